"""CPU operations by torch's own kernels: oneDNN matmuls (AMX for bfloat16), flash attention, int4 group-32 matmul.

Decode reads every weight once, so bytes bound it: out * in * 2 for `linear` in bfloat16, out * in * 0.625 for
`block_linear` (4 bits, plus a bfloat16 scale and zero for 32 values), against 24 to 29 GB/s on the 2-core machine where
the choices below were measured.

- attention, decode rows: gathered by token, padded to the longest and masked, query heads of one key head side by side
  as query rows, so that no key is repeated. Microseconds a layer (9 heads / 3, D 64, bfloat16) for 8 requests of 1,024
  tokens: 377; one request at a time: 608. One lone request is gathered by page, without a mask: 73.
- attention, longer rows: one request at a time; 512 new tokens take 804 with `is_causal` and 999 with a mask.
- attention with sinks: attention without them, times sigmoid(log-sum-exp - sink), which is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.cpu import row_sizes
from tokenspeed.kernels.reference.attention import first_seen, visible
from tokenspeed.kernels.reference.attention import paged_attention as reference_attention
from tokenspeed.kernels.reference.pointwise import stored
from tokenspeed.kernels.registry import Implementation, Need

RANK = 100
QUERY_BLOCK = 512
"""Rows of a masked prefill computed at once; bounds the mask, and keys after the block's last row are not read."""


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `ops.Embedding`."""
    return functional.embedding(token_ids, table)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.Linear`."""
    if x.dtype == torch.bfloat16:
        return row_sizes.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.RMSNorm`."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.AddRMSNorm`."""
    residual.add_(x)
    return functional.rms_norm(residual, weight.shape, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def qkv_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """See `ops.QKVRopeCache`. Queries and keys rotate together, in float32."""
    num_kv_heads, head_dim = keys.shape[2], keys.shape[3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    turning = heads[:, : num_heads + num_kv_heads].float()
    if q_norm is not None:
        turning[:, :num_heads] = functional.rms_norm(turning[:, :num_heads], q_norm.shape, q_norm.float(), eps)
    if k_norm is not None:
        turning[:, num_heads:] = functional.rms_norm(turning[:, num_heads:], k_norm.shape, k_norm.float(), eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = torch.empty_like(turning)
    half = head_dim // 2
    torch.addcmul(first * cos, second, sin, value=-1, out=turned[..., :half])
    torch.addcmul(second * cos, first, sin, out=turned[..., half:])
    key_rows, value_rows = keys.view(-1, num_kv_heads, head_dim), values.view(-1, num_kv_heads, head_dim)
    if keys.dtype == torch.float8_e4m3fn:  # which index_copy_ does not take
        key_rows[slots] = stored(turned[:, num_heads:] / k_scale, keys.dtype)
        value_rows[slots] = stored(heads[:, -num_kv_heads:].float() / v_scale, values.dtype)
    else:
        key_rows.index_copy_(0, slots, turned[:, num_heads:].to(keys.dtype))
        value_rows.index_copy_(0, slots, heads[:, -num_kv_heads:].to(values.dtype))
    return turned[:, :num_heads].to(qkv.dtype)


def paged_attention(
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
    """See `ops.PagedAttention`. Decode rows together, other requests one by one. torch's own attention knows no logit
    cap, so capped logits are the reference's."""
    if logit_cap is not None:
        return reference_attention(q, keys, values, batch, scale, window, out_scale, sinks, logit_cap)
    out = _attend(q, keys, values, batch, scale, window, sinks)
    return out if out_scale == 1.0 else out.mul_(out_scale)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    seq_lens = batch.seq_lens_host if batch.seq_lens_host is not None else batch.seq_lens.tolist()
    starts = batch.query_start.tolist()
    if batch.num_tokens == batch.num_requests and all(starts[r] == r for r in range(batch.num_requests)):
        return _decode(q, keys, values, batch.page_table, seq_lens, scale, window, sinks)
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
    decodes = [r for r in range(batch.num_requests) if starts[r + 1] - starts[r] == 1]
    # Padded to a neighbour's length torch adds up in other blocks: in bfloat16, where bits are promised, one by one.
    turn = 1 if q.dtype == torch.bfloat16 else max(1, len(decodes))
    for some in (decodes[first : first + turn] for first in range(0, len(decodes), turn)):
        rows = torch.tensor([starts[r] for r in some])
        table = batch.page_table[torch.tensor(some)]
        out[rows] = _decode(q[rows], keys, values, table, [seq_lens[r] for r in some], scale, window, sinks)
    for r in range(batch.num_requests):
        if starts[r + 1] - starts[r] > 1:
            mine = slice(starts[r], starts[r + 1])
            first = first_seen(starts[r + 1] - starts[r], seq_lens[r], window)
            k = _gather(keys, batch.page_table[r], seq_lens[r], first).to(q.dtype)
            v = _gather(values, batch.page_table[r], seq_lens[r], first).to(q.dtype)
            out[mine] = _prefill(q[mine], k, v, scale, window, sinks)
    return out


def _decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: list[int],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query a request. q [R, Hq, D] -> [R, Hq * D]."""
    num_requests, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    mask: torch.Tensor | None = None
    if num_requests == 1 and window is None:
        k = _gather(keys, page_table[0], seq_lens[0]).unsqueeze(0)
        v = _gather(values, page_table[0], seq_lens[0]).unsqueeze(0)
    else:
        slots, mask = _slots(page_table, seq_lens, keys.shape[1], window)
        flat = (-1, num_kv_heads, head_dim)
        k = keys.view(flat).index_select(0, slots.flatten()).view(num_requests, *flat)
        v = values.view(flat).index_select(0, slots.flatten()).view(num_requests, *flat)
    q = q.view(num_requests, num_kv_heads, -1, head_dim)
    k, v = k.transpose(1, 2).to(q.dtype), v.transpose(1, 2).to(q.dtype)
    if sinks is None:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        out = _with_sinks(q, k, v, mask, scale, sinks.view(num_kv_heads, -1))
    return out.reshape(num_requests, num_heads * head_dim)


def _slots(
    page_table: torch.Tensor, seq_lens: list[int], page_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pool slots of the tokens that each request's last token sees, [R, longest], and which of them are real.

    The padding repeats the last token: slots that were never written may hold NaN, which a mask does not stop.
    """
    lens = torch.tensor(seq_lens)
    seen = lens if window is None else lens.clamp(max=window)
    offsets = torch.arange(int(seen.max()))
    positions = torch.minimum((lens - seen)[:, None] + offsets, lens[:, None] - 1)
    pages = page_table.gather(1, positions // page_size).long()
    mask = None if int(seen.min()) == int(seen.max()) else (offsets < seen[:, None])[:, None, None, :]
    return pages * page_size + positions % page_size, mask


def _gather(pool: torch.Tensor, pages: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
    """As the reference's `gather_pages`, in a third of the time of indexing."""
    page_size = pool.shape[1]
    first_page = first // page_size
    gathered = pool.index_select(0, pages[first_page : -(-length // page_size)]).flatten(0, 1)
    return gathered[first - first_page * page_size : length - first_page * page_size]


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """As `scaled_dot_product_attention`, with sinks [H, Tq] or [H, 1] (any leading dimensions) in the denominator.

    An exponent more in the denominator scales a row by sum / (sum + exp(sink)) = sigmoid(log sum - sink).
    """
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    scaled: torch.Tensor = out.mul_(torch.sigmoid(log_sum - sinks).unsqueeze(-1))
    return scaled


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One request's last tokens. q [Tq, Hq, D], k and v [L, Hk, D], L last tokens of all -> [Tq, Hq * D]."""
    num_queries, length = q.shape[0], k.shape[0]
    num_kv_heads = k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if num_queries == length and window is None and sinks is None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
    blocks = []
    for start in range(0, num_queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, num_queries)
        stop = length - num_queries + end  # keys [0, stop): the block's last row sees no further
        first = first_seen(end - start, stop, window)
        mask = visible(end - start, stop - first, window)
        part = q[:, :, start:end], k[:, :, first:stop], v[:, :, first:stop]
        if sinks is None:
            out = functional.scaled_dot_product_attention(*part, attn_mask=mask, scale=scale, enable_gqa=True)
        else:  # key heads as the batch, repeated by a stride of 0
            grouped = part[0][0].unflatten(0, (num_kv_heads, -1))
            k_part, v_part = (x[0].unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in part[1:])
            out = _with_sinks(grouped, k_part, v_part, mask, scale, sinks.view(num_kv_heads, -1, 1))
            out = out.flatten(0, 1).unsqueeze(0)
        blocks.append(out)
    return torch.cat(blocks, dim=2)[0].transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight as `_weight_int4pack_mm_for_cpu` takes it, padded to a multiple of 16 rows.

    Fields:
        nibbles: the op's own layout.
        scales_zeros: [in / 32, padded out, 2] bfloat16; a value is (nibble - 8) * scale + zero.
        out_features: rows without padding.
    """

    nibbles: torch.Tensor
    scales_zeros: torch.Tensor
    out_features: int


class Int4BlockLinear:
    """Q4_0 and Q4_1 by torch's int4 group-32 matmul. Satisfies `BlockLinear`.

    A Q4_1 block is nibble * d + m = (nibble - 8) * d + (m + 8 d), a Q4_0 block (nibble - 8) * d: scale d and zero
    m + 8 d or 0, exact but for the rounding of both to bfloat16. All linears of a 135M model, ms at 1 / 8 / 64 rows:
    6.9 / 18 / 118; bfloat16 `linear` 23.7 / 24.9 / 33.6.
    """

    qtypes = frozenset({"Q4_0", "Q4_1"})
    max_rows = 8

    def pack(self, raw: torch.Tensor, qtype: str, in_features: int) -> PackedInt4:
        """See `BlockLinear.pack`."""
        out_features, header = raw.shape[0], 2 if qtype == "Q4_0" else 4
        blocks = raw.view(out_features, in_features // 32, header + 16)
        d = blocks[..., :2].contiguous().view(torch.float16).float().squeeze(-1)
        zero = torch.zeros_like(d)
        if qtype == "Q4_1":
            zero = blocks[..., 2:4].contiguous().view(torch.float16).float().squeeze(-1) + 8 * d
        nibbles = torch.cat((blocks[..., header:] & 15, blocks[..., header:] >> 4), dim=-1).view(out_features, -1)
        padding = -out_features % 16
        nibbles = functional.pad(nibbles, (0, 0, 0, padding)).to(torch.int32)
        scales_zeros = functional.pad(torch.stack((d, zero), dim=-1), (0, 0, 0, 0, 0, padding))
        return PackedInt4(
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1),
            scales_zeros.transpose(0, 1).to(torch.bfloat16).contiguous(),
            out_features,
        )

    def __call__(self, x: torch.Tensor, packed: object, bias: torch.Tensor | None) -> torch.Tensor:
        """See `BlockLinear.__call__`."""
        assert isinstance(packed, PackedInt4)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed.nibbles, 32, packed.scales_zeros)
        if y.shape[1] != packed.out_features:
            y = y[:, : packed.out_features].contiguous()
        return y if bias is None else y.add_(bias)


def not_a_cpu(need: Need) -> str | None:
    """These are CPU kernels."""
    return None if need.device.type == "cpu" else f"made for the CPU, not {need.device.type}"


def no_int4(need: Need) -> str | None:
    """Why int4 matmuls cannot serve; float32 asks for exact weights, which bfloat16 scales are not."""
    if (reason := not_a_cpu(need)) is not None:
        return reason
    if need.dtype != torch.bfloat16:
        return f"rounds scales to bfloat16, and the dtype is {str(need.dtype).removeprefix('torch.')}"
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu"
    return None


IMPLEMENTATIONS = (
    Implementation("embedding", "torch_cpu", RANK, not_a_cpu, lambda need: embedding),
    Implementation("linear", "torch_cpu", RANK, not_a_cpu, lambda need: linear),
    Implementation("rms_norm", "torch_cpu", RANK, not_a_cpu, lambda need: rms_norm),
    Implementation("add_rms_norm", "torch_cpu", RANK, not_a_cpu, lambda need: add_rms_norm),
    Implementation("silu_and_mul", "torch_cpu", RANK, not_a_cpu, lambda need: silu_and_mul),
    Implementation("qkv_rope_cache", "torch_cpu", RANK, not_a_cpu, lambda need: qkv_rope_cache),
    Implementation("paged_attention", "torch_cpu", RANK, not_a_cpu, lambda need: paged_attention),
    Implementation("block_linear", "torch_cpu", RANK, no_int4, lambda need: Int4BlockLinear()),
)
