"""Memory for weights and for a tape's results: blocks carved from large mappings, freed by reference counting."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref

import torch

ALIGNMENT = 64
HUGE_PAGE_BYTES = 2 << 20
WEIGHT_CHUNK_BYTES = 32 << 20
TAPE_CHUNK_BYTES = 2 << 20


def _map(size_bytes: int) -> mmap.mmap:
    """New zeroed memory. Private: the kernel gives shared mappings, Python's default, no huge pages."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: slower, not wrong
            pass
    return memory


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class WeightArena:
    """Packed weights side by side in huge pages: a step reads them all, and 4 KiB pages cost it address translations.

    A chunk lives as long as any block in it.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """A new zeroed uint8 tensor of `size_bytes`, aligned to 64 bytes."""
        if self._chunk is None or self._used + size_bytes > len(self._chunk):
            self._chunk = _map(_round_up(max(size_bytes, WEIGHT_CHUNK_BYTES), HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._chunk))
            self._used = -start % HUGE_PAGE_BYTES
        block = torch.frombuffer(self._chunk, dtype=torch.uint8, count=size_bytes, offset=self._used)
        self._used += _round_up(size_bytes, ALIGNMENT)
        return block


class TapeArena:
    """Results of a tape's operations. A block whose tensor and views are all gone is given to a later operation.

    That is right because the tape replays in the order of recording, and it keeps the working set in a core's cache.
    """

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._ranges: list[tuple[int, int]] = []
        self._used = 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined content, aligned to 64 bytes."""
        size_bytes = max(ALIGNMENT, _round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT))
        free = self._free.setdefault(size_bytes, [])
        place = free.pop() if free else self._grow(size_bytes)
        chunk, offset = place
        buffer = (ctypes.c_char * size_bytes).from_buffer(self._chunks[chunk], offset)
        # torch holds `buffer` until the last view of the tensor is gone.
        tensor = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)
        weakref.finalize(buffer, free.append, place).atexit = False
        return tensor

    def owns(self, address: int) -> bool:
        """Whether the address lies in this arena."""
        return any(start <= address < end for start, end in self._ranges)

    @property
    def size_bytes(self) -> int:
        """Bytes mapped."""
        return sum(len(chunk) for chunk in self._chunks)

    def _grow(self, size_bytes: int) -> tuple[int, int]:
        if not self._chunks or self._used + size_bytes > len(self._chunks[-1]):
            chunk = _map(_round_up(max(size_bytes, TAPE_CHUNK_BYTES), mmap.PAGESIZE))
            start = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            self._chunks.append(chunk)
            self._ranges.append((start, start + len(chunk)))
            self._used = 0
        place = (len(self._chunks) - 1, self._used)
        self._used += size_bytes
        return place
