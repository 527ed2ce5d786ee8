"""Reads the header of a safetensors file: tensor names, types, shapes and byte ranges. No torch.

Layout: header length u64 (little endian) | JSON header | tensor data; byte ranges count from the end of the header.
Read here instead of with the `safetensors` package because that needs a framework to name a tensor, and an error has
to name the file, the tensor and the bytes that are missing before any data is read.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.protocol.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor: `dtype` is the format's name (`BF16`), `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors(path: str | Path) -> tuple[SafetensorsEntry, ...]:
    """The tensors of `path`, in file order.

    Raises:
        CheckpointError: not a safetensors file, a damaged header, or data beyond the end of the file.
    """
    path = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file; download it again")
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, the file has {size - 8} after it; it is "
                    "cut off or not a safetensors file: download it again"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        entries = msgspec.json.decode(header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not JSON ({error}); the file is damaged: download it again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; the file is damaged: download it again")
    start = 8 + length
    found = [_entry(path, name, value, start, size) for name, value in entries.items() if name != "__metadata__"]
    return tuple(sorted(found, key=lambda entry: entry.offset))


def _entry(path: str, name: str, value: Any, start: int, size: int) -> SafetensorsEntry:
    where = f"{path}: tensor {name!r}"
    try:
        entry = msgspec.convert(value, _Raw)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: damaged header entry ({error}); download the file again") from error
    element = ELEMENT_BYTES.get(entry.dtype)
    if element is None:
        raise CheckpointError(
            f"{where} has type {entry.dtype!r}, which is not known; known: {', '.join(ELEMENT_BYTES)}"
        )
    expected = element
    for axis in entry.shape:
        if axis < 0:
            raise CheckpointError(f"{where} has the shape {entry.shape}; the file is damaged: download it again")
        expected *= axis
    begin, end = entry.data_offsets
    if begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{where} of type {entry.dtype} and shape {entry.shape} needs {expected} bytes, the header gives "
            f"{end - begin}; the file is damaged: download it again"
        )
    if start + end > size:
        raise CheckpointError(
            f"{where} lies at bytes {start + begin} to {start + end}, but the file has only {size} bytes; "
            "it is cut off: download it again"
        )
    return SafetensorsEntry(name, entry.dtype, tuple(entry.shape), start + begin, expected)


class _Raw(msgspec.Struct):
    """A header entry as the format writes it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
