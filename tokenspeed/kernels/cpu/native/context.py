"""The native implementation of every operation, for bfloat16 on a CPU. Knows tensors and shapes, not arithmetic.

An operation with a shape that has no native form is passed to the next implementation by rank; while a tape is
recorded it raises `GraphUnsupported` instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cpu.native.build import BuildFailed, build
from tokenspeed.kernels.cpu.native.library import FLOAT_OUT, GGML_TYPES, Library, Op, TileFormat, encode
from tokenspeed.kernels.cpu.native.memory import WeightArena
from tokenspeed.kernels.cpu.native.tape import NativeRecorder, Tape
from tokenspeed.kernels.ops import GraphUnsupported
from tokenspeed.kernels.registry import REQUIRED, Implementation, Need, discover

RANK = 10
NAME = "native_cpu"
MAX_LINEAR_ROWS = 8
MAX_BLOCK_ROWS = 24
"""Above these torch's AMX matmul on the dense weight wins (measured: docs/decisions/002-native-cpu-kernels.md)."""
MAX_ATTENTION_ROWS = 64
MAX_HEAD_DIM = 512
MAX_COUNTERS = 1 << 16
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A block-quantized weight in tiles.

    Fields:
        tiles: uint8, ceil(out_features / 16) tiles of `layout.tile_bytes`.
    """

    tiles: torch.Tensor
    in_features: int
    out_features: int
    layout: TileFormat


class NativeContext:
    """One library, one pool, all operations.

    Eager calls may come from several threads; recording concerns its own thread only.

    Args:
        fallback: operation name -> what serves shapes that have no native form.
    """

    def __init__(self, library: Library, fallback: Callable[[str], Callable[..., Any]]) -> None:
        self.library = library
        self._fallback = fallback
        self._tapes: dict[int, Tape] = {}
        self.weights = WeightArena()
        self.recorder = NativeRecorder(library, self._begin, self._end)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See `ops.Embedding`. An id outside the table gives a row of NaN."""
        if not (token_ids.is_contiguous() and token_ids.dtype == torch.int64 and _plain(table)):
            return self._other("embedding", "int64 ids and a bfloat16 table, contiguous", token_ids, table)
        rows, width = token_ids.shape[0], table.shape[1]
        out = self._empty((rows, width), BF16)
        self._do(Op.EMBEDDING, (rows, width, table.shape[0]), (token_ids, table, out))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `ops.RMSNorm`."""
        if not _plain(x, weight):
            return self._other("rms_norm", "contiguous bfloat16", x, weight, eps)
        out = self._empty(tuple(x.shape), BF16)
        width = x.shape[-1]
        self._do(Op.RMS_NORM, (x.numel() // width, width), (x, weight, out), eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `ops.AddRMSNorm`."""
        if not _plain(x, residual, weight):
            return self._other("add_rms_norm", "contiguous bfloat16", x, residual, weight, eps)
        out = self._empty(tuple(x.shape), BF16)
        width = x.shape[-1]
        self._do(Op.ADD_RMS_NORM, (x.numel() // width, width), (x, weight, out, residual), eps)
        return out

    def qkv_rope_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See `ops.QKVRopeCache`. The result is a view of qkv, rotated in place. A negative slot writes nothing."""
        num_kv_heads, head_dim = keys.shape[2], keys.shape[3]
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        if not (_plain(qkv, keys, values, *norms) and _indices(positions, slots)) or head_dim > MAX_HEAD_DIM:
            given = (qkv, positions, cos_sin, keys, values, slots, q_norm, k_norm, eps)
            return self._other("qkv_rope_cache", f"contiguous bfloat16, head_dim up to {MAX_HEAD_DIM}", *given)
        rows = qkv.shape[0]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        tensors = (qkv, positions, cos_sin, keys, values, slots, q_norm, k_norm)
        self._do(Op.QKV_ROPE_CACHE, (rows, num_heads, num_kv_heads, head_dim), tensors, eps)
        return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))

    def paged_attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        out_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        """See `ops.PagedAttention`. For decode and short chunks; many rows, and capped logits, go to the next
        implementation."""
        rows, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[2]
        in_rows = q.stride(2) == 1 and q.stride(1) == head_dim and q.dtype == BF16
        fits = head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and rows * num_heads <= MAX_COUNTERS
        fits = fits and out_scale == 1.0 and logit_cap is None
        tape = self._tape()
        if not (in_rows and fits and _plain(keys, values)) or (tape is None and rows > MAX_ATTENTION_ROWS):
            wants = f"bfloat16, head_dim a multiple of 16 up to {MAX_HEAD_DIM}, no logit cap"
            given = (q, keys, values, batch, scale, window, out_scale, sinks, logit_cap)
            return self._other("paged_attention", wants, *given)
        assert batch.query_start.dtype == batch.seq_lens.dtype == batch.page_table.dtype == torch.int32
        assert batch.page_table.stride(1) == 1, "pages of a request lie side by side"
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), "sinks are float32"
        out = self._empty((rows, num_heads * head_dim), BF16)
        shape = (rows, batch.num_requests, num_heads, num_kv_heads, head_dim, keys.shape[1])
        ints = (*shape, batch.page_table.stride(0), window or 0, q.stride(0))
        tensors = (q, keys, values, batch.query_start, batch.seq_lens, batch.page_table, out, sinks)
        self._do(Op.ATTENTION, ints, tensors, scale)
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `ops.SiluAndMul`."""
        if not _plain(gate_up):
            return self._other("silu_and_mul", "contiguous bfloat16", gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty((rows, width), BF16)
        self._do(Op.SILU_AND_MUL, (rows, width), (gate_up, out))
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ops.Linear`. Up to `MAX_LINEAR_ROWS` rows: a tape of dense weights is not made where it would lose."""
        rows, in_features = x.shape
        if not _plain(x, weight, bias) or rows > MAX_LINEAR_ROWS:
            return self._other("linear", f"contiguous bfloat16, up to {MAX_LINEAR_ROWS} rows", x, weight, bias)
        out = self._empty((rows, weight.shape[0]), BF16)
        self._do(Op.LINEAR, (rows, in_features, weight.shape[0]), (x, weight, bias, out))
        return out

    def block_linear(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """x [T, in] -> [T, out] in bfloat16 or float32, from the sums in float32."""
        if not _plain(x, bias):
            raise GraphUnsupported("block_linear takes contiguous bfloat16")
        assert x.shape[1] == packed.in_features, f"x has {x.shape[1]} columns, the weight {packed.in_features}"
        rows, layout = x.shape[0], packed.layout
        out = self._empty((rows, packed.out_features), out_dtype)
        ints = (rows, packed.in_features, packed.out_features, layout.bits, layout.group, int(layout.has_min))
        self._do(
            Op.BLOCK_LINEAR, ints, (x, packed.tiles, bias, out), flags=FLOAT_OUT if out_dtype == torch.float32 else 0
        )
        return out

    def _begin(self, tape: Tape) -> None:
        if tape.thread in self._tapes:
            raise GraphUnsupported("this thread is recording already")
        self._tapes[tape.thread] = tape

    def _end(self) -> None:
        del self._tapes[_thread()]

    def _tape(self) -> Tape | None:
        return self._tapes.get(_thread()) if self._tapes else None

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tape = self._tape()
        return torch.empty(shape, dtype=dtype) if tape is None else tape.arena.empty(shape, dtype)

    def _do(
        self,
        op: Op,
        ints: tuple[int, ...],
        tensors: tuple[torch.Tensor | None, ...],
        number: float = 0.0,
        flags: int = 0,
    ) -> None:
        call = encode(op, ints, tuple(0 if t is None else t.data_ptr() for t in tensors), number, flags)
        tape = self._tape()
        if tape is None:
            self.library.run(call)
        else:
            tape.append(call, tensors)

    def _other(self, op: str, wants: str, *given: Any) -> Any:
        if self._tape() is not None:
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in given if isinstance(t, torch.Tensor))
            raise GraphUnsupported(f"{op} takes {wants}; got {shapes}")
        return self._fallback(op)(*given)


class NativeBlockLinear:
    """Satisfies `BlockLinear` for every GGUF type that is an affine code in groups of 16 or 32.

    Codes are exact and sums are float; scales are kept in half precision (exact for Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0).
    """

    qtypes = frozenset(GGML_TYPES)
    max_rows = MAX_BLOCK_ROWS

    def __init__(self, context: NativeContext) -> None:
        self._context = context

    def pack(self, raw: torch.Tensor, qtype: str, in_features: int) -> PackedWeight:
        """See `BlockLinear.pack`. The result lies in huge pages beside the other weights."""
        library = self._context.library
        layout = library.tile_format(qtype, in_features)
        assert layout is not None, f"{qtype} has no blocks in rows of {in_features}"
        raw = raw.contiguous()
        assert raw.shape[1] == layout.row_bytes, f"{qtype} rows of {in_features} are {layout.row_bytes} bytes"
        out_features = raw.shape[0]
        tiles = self._context.weights.zeros(-(-out_features // 16) * layout.tile_bytes)
        library.pack(qtype, raw.data_ptr(), in_features, out_features, tiles.data_ptr())
        return PackedWeight(tiles, in_features, out_features, layout)

    def __call__(
        self,
        x: torch.Tensor,
        packed: object,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype = BF16,
    ) -> torch.Tensor:
        """See `BlockLinear.__call__`. `out_dtype` float32 keeps the sums as they are, for logits."""
        assert isinstance(packed, PackedWeight)
        return self._context.block_linear(x, packed, bias, out_dtype)


def _thread() -> int:
    return threading.get_ident()


def _plain(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or (t.dtype == BF16 and t.is_contiguous()) for t in tensors)


def _indices(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.int64 and t.is_contiguous() for t in tensors)


def next_by_rank(need: Need) -> Callable[[str], Callable[..., Any]]:
    """Finds, for an operation, the best implementation that is not this one; made once an operation."""

    @cache
    def find(op: str) -> Callable[..., Any]:
        for implementation in discover():
            if implementation.op == op and implementation.name != NAME and implementation.why_not(need) is None:
                made: Callable[..., Any] = implementation.make(need)
                return made
        raise AssertionError(f"the reference serves {op}")

    return find


@cache
def _built() -> str | None:
    """Build and load once a process. None, or why not."""
    try:
        Library(build(), num_threads=1)
    except BuildFailed as error:
        return str(error)
    return None


@cache
def context_for(need: Need, num_threads: int) -> NativeContext:
    """The context that all operations of one `Ops` share: a tape must see them all."""
    return NativeContext(Library(build(), num_threads), next_by_rank(need))


def why_not(need: Need) -> str | None:
    """None when the native kernels serve: bfloat16 on a CPU with a C compiler."""
    if need.device.type != "cpu":
        return f"made for the CPU, not {need.device.type}"
    if need.dtype != BF16:
        return f"computes bfloat16, and the dtype is {str(need.dtype).removeprefix('torch.')}"
    if os.name != "posix":
        return "needs POSIX threads"
    return _built()


def why_not_cache(need: Need) -> str | None:
    """As `why_not`, for the operations that touch the KV pool."""
    if need.kv_dtype not in (None, BF16):
        return f"keeps keys and values in bfloat16, not {str(need.kv_dtype).removeprefix('torch.')}"
    return why_not(need)


def _make(attribute: str) -> Callable[[Need], Any]:
    return lambda need: getattr(context_for(need, torch.get_num_threads()), attribute)


def _make_block_linear(need: Need) -> NativeBlockLinear:
    return NativeBlockLinear(context_for(need, torch.get_num_threads()))


_CACHE_OPS = ("qkv_rope_cache", "paged_attention")

IMPLEMENTATIONS = (
    *(
        Implementation(op, NAME, RANK, why_not_cache if op in _CACHE_OPS else why_not, _make(op))
        for op in (*REQUIRED, "recorder")
    ),
    Implementation("block_linear", NAME, RANK, why_not, _make_block_linear),
)
