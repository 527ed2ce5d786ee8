"""Sampling inside a decode graph: one token a row, without sorting the vocabulary and without the host.

Formula   Gumbel-max (Gumbel 1954): argmax_v (l[v] / T + g[v]), g = -log(-log(u)), draws from softmax(l / T); u is a
          counter-based uniform (Philox) of (seed, position, v), so a row depends on nobody else. Greedy: g = 0, T = 1.
          top_k, top_p and min_p keep the logits at or above one threshold, found by bisection over the float's bits:
          the k-th largest value; the largest t whose tokens at or above it weigh at least top_p of the kept mass.
Bytes     2 V (bfloat16) a row for the draw; as many a bisection step (from L2), only in rows that filter.
Bound     V = 152k: 0.3 MB a row, 0.07 us at 4.26 TB/s; a filtering row takes some 64 passes over L2.

Ties at the threshold are all kept. A row whose logits hold NaN, or no finite maximum, gets token -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling parameters by slot, on the device: temperature (0 = greedy), top_p, min_p [S] float32; top_k [S] int32
    (0 = off); seed [S] int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor


@triton.jit
def _ordered(x):
    """float32 -> int32 with the same order (for finite values)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    threshold_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the smallest logit that may be drawn."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    filters = (top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < V))
    threshold = float("-inf")
    if filters & (temperature > 0.0):
        base = logits_ptr + row.to(tl.int64) * V
        cols = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(base + start + cols, mask=start + cols < V, other=float("-inf")).to(tl.float32)
            highest = tl.maximum(highest, x)
            lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
        best = tl.max(highest, axis=0)
        floor = _ordered(tl.min(lowest, axis=0))
        low = floor
        high = _ordered(best)
        if (top_k > 0) & (top_k < V):
            # invariant: count(l >= low) >= k; the answer is the largest such key
            while low < high:
                middle = low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)
                cut = _unordered(middle)
                count = tl.zeros((BLOCK,), dtype=tl.int32)
                for start in range(0, V, BLOCK):
                    x = tl.load(base + start + cols, mask=start + cols < V, other=float("-inf")).to(tl.float32)
                    count += (x >= cut).to(tl.int32)
                if tl.sum(count, axis=0) >= top_k:
                    low = middle
                else:
                    high = middle - 1
        threshold = _unordered(low)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, best + temperature * tl.log(min_p))
        if top_p < 1.0:
            mass = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, V, BLOCK):
                x = tl.load(base + start + cols, mask=start + cols < V, other=float("-inf")).to(tl.float32)
                mass += tl.where(x >= threshold, tl.exp((x - best) / temperature), 0.0)
            wanted = top_p * tl.sum(mass, axis=0)
            low = _ordered(threshold)
            high = _ordered(best)
            # invariant: mass(l >= low) >= wanted; the answer is the largest such key
            while low < high:
                middle = low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)
                cut = _unordered(middle)
                mass = tl.zeros((BLOCK,), dtype=tl.float32)
                for start in range(0, V, BLOCK):
                    x = tl.load(base + start + cols, mask=start + cols < V, other=float("-inf")).to(tl.float32)
                    mass += tl.where(x >= cut, tl.exp((x - best) / temperature), 0.0)
                if tl.sum(mass, axis=0) >= wanted:
                    low = middle
                else:
                    high = middle - 1
            threshold = _unordered(low)
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _draw_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    threshold_ptr,
    values_ptr,
    indices_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best perturbed logit of one chunk of one row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), axis=0)
    if temperature > 0.0:
        position = tl.load(positions_ptr + row).to(tl.int64)
        seed = tl.load(seed_ptr + slot) + position * 0x1E3779B97F4A7C15
        uniform = tl.maximum(tl.rand(seed, cols), 1e-10)
        noise = -tl.log(-tl.log(uniform))
        x = tl.where(x >= tl.load(threshold_ptr + row), x / temperature + noise, float("-inf"))
    value = tl.max(x, axis=0)
    index = tl.min(tl.where(x == value, cols, V), axis=0)
    value = tl.where(is_nan > 0, float("nan"), value)
    out = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + out, value)
    tl.store(indices_ptr + out, index)


@triton.jit
def _choose_kernel(
    values_ptr,
    indices_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    token_ids_ptr,
    token_ids_stride,
    num_chunks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best of a row's chunks; written to `out` and, where it can be read next, to the slot's token ids."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_chunks
    values = tl.load(values_ptr + row * num_chunks + cols, mask=inside, other=float("-inf"))
    indices = tl.load(indices_ptr + row * num_chunks + cols, mask=inside, other=0x7FFFFFFF)
    is_nan = tl.max((values != values).to(tl.int32), axis=0)
    value = tl.max(values, axis=0)
    index = tl.min(tl.where(values == value, indices, 0x7FFFFFFF), axis=0)
    failed = (is_nan > 0) | (value == float("-inf")) | (value == float("inf"))
    tl.store(out_ptr + row, tl.where(failed, -1, index))
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    tl.store(token_ids_ptr + slot * token_ids_stride + position, tl.where(failed, 0, index).to(tl.int64))


@triton.jit
def _masked_kernel(logits_ptr, rows_ptr, masks_ptr, out_ptr, V: tl.constexpr, CHUNK: tl.constexpr):
    """One chunk of row rows[i] of the logits, copied to row i, with -inf for what bit v % 32 of word v // 32 forbids.
    NaN stays, wherever it is: such a row has failed."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = cols < V
    x = tl.load(logits_ptr + row * V + cols, mask=inside, other=0.0).to(tl.float32)
    words = tl.load(masks_ptr + place * ((V + 31) // 32) + cols // 32, mask=inside, other=0)
    keep = (((words >> (cols % 32)) & 1) != 0) | (x != x)
    tl.store(out_ptr + place * V + cols, tl.where(keep, x, float("-inf")), mask=inside)


CHUNK = 4096


def masked_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Some rows of the logits with -inf wherever a mask forbids a token.

    Args:
        logits: [R, V] float32 or bfloat16, contiguous.
        rows: [n] int64. masks: [n, ceil(V / 32)] int32, bit v % 32 of word v // 32 allows token v.
    Returns:
        [n, V] in the dtype of `logits`.
    """
    vocab = logits.shape[1]
    out = logits.new_empty(len(rows), vocab)
    _masked_kernel[(len(rows), triton.cdiv(vocab, CHUNK))](logits, rows, masks, out, V=vocab, CHUNK=CHUNK, num_warps=8)
    return out


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
    pdl: bool = True,
) -> torch.Tensor:
    """Draw one token a row and append it to its slot.

    Args:
        logits: [R, V] float32 or bfloat16, contiguous.
        slots: [R] int32. positions: [R] int64, where the sampled token goes in its slot.
        token_ids: [S, L] int64; written at [slot, position].
    Returns:
        [R] int32 token ids, -1 where the logits were unusable.
    """
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    threshold = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _threshold_kernel[(num_rows,)](
        logits,
        slots,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        threshold,
        V=vocab,
        BLOCK=8192,
        PDL=pdl,
        num_warps=16,
        launch_pdl=pdl,
    )
    _draw_kernel[(num_rows, num_chunks)](
        logits,
        slots,
        positions,
        sampling.temperature,
        sampling.seed,
        threshold,
        values,
        indices,
        V=vocab,
        CHUNK=CHUNK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    _choose_kernel[(num_rows,)](
        values,
        indices,
        slots,
        positions,
        out,
        token_ids,
        token_ids.stride(0),
        num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out
