"""Weights from files to a device through a ring of page-locked buffers: reading, copying and loading overlap.

    file    | read 3 | read 4 | read 5 | ...      threads, ahead of the loader by the length of the ring
    link       | copy 2 | copy 3 | ...            asynchronous, in order
    loader       | place 1 | place 2 | ...        rules of the layers, on device tensors

The order in which tensors will be asked for is known before: it is the order in the files, so that reads are
sequential. Host memory in use is the ring, however large the model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tokenspeed.kernels.upload import staging_buffer, upload
from tokenspeed.loader.file_bytes import read_into

BUFFER_BYTES = 32 << 20
NUM_BUFFERS = 8
NUM_THREADS = 4
"""One thread copies about 5 GB/s out of the page cache, a PCIe 5 link takes 50."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + nbytes) of a file; `where` names file and tensor for errors."""

    path: str
    offset: int
    nbytes: int
    where: str


@dataclass(slots=True)
class _Read:
    """A piece that is being read."""

    index: int
    buffer: torch.Tensor
    nbytes: int
    done: Future[None]


class WeightStream:
    """Gives the bytes of planned spans as device tensors, reading ahead. Used by one thread; starts with the first
    `take` and stops with `close`.

    Args:
        spans: in the order in which they will be taken. One that is passed over or taken again is read on the spot.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._spans = list(spans)
        self._index = {span: index for index, span in enumerate(self._spans)}
        self._next = 0
        self._buffer_bytes = min(buffer_bytes, max((span.nbytes for span in self._spans), default=1) or 1)
        self._num_buffers = num_buffers
        self._num_threads = num_threads
        self._pieces = self._plan()
        self._reading: deque[_Read] = deque()
        self._copying: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()
        self._num_made = 0
        self._threads: ThreadPoolExecutor | None = None

    def take(self, span: Span, device: torch.device) -> torch.Tensor:
        """uint8 [nbytes] on `device`, a new tensor, ready in order with the device's current stream.

        Raises:
            CheckpointError: the file cannot be read or ends early.
        """
        index = self._index.get(span, -1)
        if index < self._next:
            out = torch.empty(span.nbytes, dtype=torch.uint8)
            read_into(out, span.path, span.offset, span.where)
            return out.to(device)
        self._next = index + 1
        out = torch.empty(span.nbytes, dtype=torch.uint8, device=device)
        done = 0
        while done < span.nbytes:
            self._read_ahead(device)
            piece = self._reading.popleft()
            piece.done.result()
            if piece.index < index:  # passed over
                self._copying.append((piece.buffer, _nothing))
                continue
            wait = upload(piece.buffer[: piece.nbytes], out[done : done + piece.nbytes])
            self._copying.append((piece.buffer, wait))
            done += piece.nbytes
        self._read_ahead(device)
        return out

    def close(self) -> None:
        """Stop reading, wait for the copies and give the ring back."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        while self._copying:
            self._copying.popleft()[1]()
        self._reading.clear()
        self._pieces = iter(())
        self._next = len(self._spans)

    def _plan(self) -> Iterator[tuple[int, int, int]]:
        """(span, start in it, length) of every piece, in order."""
        for index, span in enumerate(self._spans):
            for start in range(0, span.nbytes, self._buffer_bytes):
                yield index, start, min(self._buffer_bytes, span.nbytes - start)

    def _read_ahead(self, device: torch.device) -> None:
        """Keep at least half of the ring reading; the other half may be on its way to the device, nobody waiting."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="weights")
        while len(self._reading) < self._num_buffers:
            if self._num_made == self._num_buffers and len(self._reading) > self._num_buffers // 2:
                return
            piece = next(self._pieces, None)
            if piece is None:
                return
            index, start, nbytes = piece
            span, buffer = self._spans[index], self._free_buffer(device)
            read = self._threads.submit(read_into, buffer[:nbytes], span.path, span.offset + start, span.where)
            self._reading.append(_Read(index, buffer, nbytes, read))

    def _free_buffer(self, device: torch.device) -> torch.Tensor:
        """A buffer nobody uses: a new one while the ring is short, else that of the oldest copy."""
        if self._num_made < self._num_buffers:
            self._num_made += 1
            return staging_buffer(self._buffer_bytes, device)
        buffer, wait = self._copying.popleft()
        wait()
        return buffer


def _nothing() -> None:
    """There was no copy."""
