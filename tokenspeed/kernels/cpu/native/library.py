"""The compiled library as Python sees it: a pool of threads, calls as bytes, facts about block types.

Knows pointers, not tensors.
"""

from __future__ import annotations

import ctypes
import enum
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.kernels.cpu.native.build import BuildFailed

NUM_INTS, NUM_FLOATS, NUM_POINTERS = 12, 2, 12
CALL = struct.Struct(f"=ii{NUM_INTS}q{NUM_FLOATS}f{NUM_POINTERS}Q")
"""`ts_call` of ts.h."""

FLOAT_OUT = 1

GGML_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8}
GGML_TYPES |= {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


class Op(enum.IntEnum):
    """Order of the enum in ts.h."""

    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    QKV_ROPE_CACHE = 3
    ATTENTION = 4
    SILU_AND_MUL = 5
    LINEAR = 6
    BLOCK_LINEAR = 7


def encode(op: Op, ints: tuple[int, ...], pointers: tuple[int, ...], number: float = 0.0, flags: int = 0) -> bytes:
    """One call. Fields per operation are listed beside its C code."""
    ints += (0,) * (NUM_INTS - len(ints))
    pointers += (0,) * (NUM_POINTERS - len(pointers))
    return CALL.pack(op, flags, *ints, number, 0.0, *pointers)


@dataclass(frozen=True, slots=True)
class TileFormat:
    """How a block type is kept: see matmul.c."""

    bits: int
    group: int
    has_min: bool
    row_bytes: int
    tile_bytes: int


class Library:
    """One loaded build and its thread pool. Calls may come from any thread; they run one list at a time.

    Args:
        num_threads: of the pool, the calling thread among them.
    Raises:
        BuildFailed: the file does not load, or the system gives no threads.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildFailed(f"the compiled kernels do not load: {error}") from error
        self._c.ts_abi.restype = ctypes.c_long
        self._c.ts_pool_new.restype = ctypes.c_void_p
        self._c.ts_pool_new.argtypes = [ctypes.c_int]
        self._c.ts_pool_free.argtypes = [ctypes.c_void_p]
        self._c.ts_pool_free.restype = None
        self._c.ts_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
        self._c.ts_run.restype = None
        self._c.ts_format.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.POINTER(ctypes.c_long)]
        self._c.ts_pack.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
        self._c.ts_pack.restype = None
        if self._c.ts_abi() != CALL.size:
            raise BuildFailed(f"the compiled kernels take calls of {self._c.ts_abi()} bytes, not {CALL.size}")
        self.num_threads = num_threads
        self._pool = self._c.ts_pool_new(num_threads)
        if not self._pool:
            raise BuildFailed(f"the system gives no {num_threads} threads")
        weakref.finalize(self, self._c.ts_pool_free, self._pool)

    def run(self, calls: bytes, num_calls: int = 1) -> None:
        """Run encoded calls in order; returns when all are done. The global interpreter lock is free meanwhile."""
        self._c.ts_run(self._pool, calls, num_calls)

    def tile_format(self, qtype: str, in_features: int) -> TileFormat | None:
        """None when rows of that length have no such blocks, or the type has no tiles."""
        facts = (ctypes.c_long * 5)()
        if qtype not in GGML_TYPES or not self._c.ts_format(GGML_TYPES[qtype], in_features, facts):
            return None
        return TileFormat(facts[0], facts[1], bool(facts[2]), facts[3], facts[4])

    def pack(self, qtype: str, raw: int, in_features: int, out_features: int, tiles: int) -> None:
        """GGUF rows at address `raw` -> tiles at address `tiles`, which must be zeroed."""
        self._c.ts_pack(GGML_TYPES[qtype], raw, in_features, out_features, tiles)
