"""Bytes of a file into memory, without a mapping: a file that shrinks meanwhile gives an error, not a crash."""

from __future__ import annotations

import torch

from tokenspeed.protocol.errors import CheckpointError


def read_bytes(path: str, offset: int, nbytes: int, where: str) -> torch.Tensor:
    """uint8 [nbytes], a new tensor: the file's bytes [offset, offset + nbytes).

    Raises:
        CheckpointError: the file cannot be read or ends early. `where` names file and tensor.
    """
    out = torch.empty(nbytes, dtype=torch.uint8)
    read_into(out, path, offset, where)
    return out


def read_into(out: torch.Tensor, path: str, offset: int, where: str) -> None:
    """Fill uint8 [nbytes] on the host; safe to call from several threads, which then read at the same time.

    Raises:
        CheckpointError: as `read_bytes`.
    """
    nbytes = out.shape[0]
    view = out.numpy().data
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            # One call reads at most 2 GiB on Linux.
            while done < nbytes and (count := file.readinto(view[done:])):
                done += count
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
    if done < nbytes:
        raise CheckpointError(f"{where}: the file ended {nbytes - done} bytes early; it changed while it was read")
