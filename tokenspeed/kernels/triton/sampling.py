"""Sampling inside a decode graph: one token a row, without sorting the vocabulary and without the host.

Formula   Gumbel-max (Gumbel 1954): argmax_v (l[v] / T + g[v]), g = -log(-log(u)), draws from softmax(l / T); u is a
          counter-based uniform (Philox) of (seed, position, v), so a row depends on nobody else. Greedy: g = 0, T = 1.
          top_k, top_p and min_p keep the logits at or above one threshold: the k-th largest value; the largest t whose
          tokens at or above it weigh at least top_p of the kept mass; max + T log(min_p). Exact, ties are kept.
Steps     a row without filters: the best of every chunk of the vocabulary, then the best of those. A row with filters:
          1 survey    the largest logit of every group of 128
          2 weigh     top_k: a floor that at least k groups reach, so at least k logits do and few more
                      top_p alone: mass by distance from the best logit, in buckets of T / 64 down to 16 T
          3 gather    lists what may or may not stay (from the floor up; in the bucket where top_p is reached), and
                      draws among what stays for certain (the buckets above)
          4 choose    finds the threshold in the list by bisection, draws from the list, takes the best of all
          Rows that are drawn again under masks: the survey takes the forbidden away while it loads, and leaves rows
          that filter as copies for the others. Where no row filters, 1 and 4 are all.
          Masses are whole numbers of 2**-40 of the best token's: their sums do not depend on the order of additions.
Bytes     2 V (bfloat16) a row for the draw; with top_k or min_p twice, with top_p alone three times that, from L2.
Bound     V = 152k: 0.3 MB a row, 0.07 us at 4.26 TB/s.

A list that does not fit, or a top_k beyond the number of groups, is searched for in the whole row, by one program and
some 60 passes. A row whose logits hold NaN, or no finite maximum, gets token -1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.slot_ops import PickedRows, SlotSampling
from tokenspeed.kernels.triton.launch import QuickLaunch, ceil_div, power_of_2

CHUNK = 4096
"""Logits that a program looks at."""
PIECE = 2048
"""The same, at a time, in kernels whose programs take more in turn."""
PROGRAMS = 512
"""Of such a kernel: rows that do not filter should cost a wave or two, of 132 to 264, and no more."""
GROUP = 128
BUCKETS = 1024
BUCKETS_PER_T = 64
LISTED = 4096
"""Room of a row's list."""
MASS = 2**40
"""The best token's; half a million times as much still fits int64."""
LOW_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Of float32, zero in every number of the type: bisection leaves them out."""


@triton.jit
def _ordered(x):
    """float32 -> int32 with the same order (for finite values; both zeros are one)."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _row_parameters(row, slots_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, V: tl.constexpr):
    """Of a row: temperature, top_p, min_p, top_k (0 = off), and whether it filters."""
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_k = tl.where((top_k > 0) & (top_k < V), top_k, 0)
    filters = (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0) | (top_k > 0))
    return temperature, top_p, min_p, top_k, filters


@triton.jit
def _peak(peaks_ptr, row, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """A row's largest logit, and whether it can be sampled from."""
    cols = tl.arange(0, BLOCK)
    peaks = tl.load(peaks_ptr + row * NUM_CHUNKS + cols, mask=cols < NUM_CHUNKS, other=float("-inf"))
    is_nan = tl.max((peaks != peaks).to(tl.int32), axis=0)
    best = tl.max(tl.where(peaks == peaks, peaks, float("-inf")), axis=0)
    return best, (is_nan == 0) & (best > float("-inf")) & (best < float("inf"))


@triton.jit
def _lowest(best, temperature, min_p):
    """The smallest logit that min_p keeps."""
    return tl.where(min_p > 0.0, best + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))


@triton.jit
def _mass(x, best, temperature, SCALE: tl.constexpr):
    return (tl.exp((x - best) / temperature) * SCALE).to(tl.int64)


@triton.jit
def _share(total, top_p):
    """The least whole mass that is at least top_p of the total."""
    wanted = total.to(tl.float64) * top_p.to(tl.float64)
    whole = wanted.to(tl.int64)
    whole += (whole.to(tl.float64) < wanted).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), total)


@triton.jit
def _bucket(x, best, temperature, NUM: tl.constexpr, PER_T: tl.constexpr):
    """Distance from the best logit; the last bucket has all that are farther."""
    return tl.minimum((best - x) * (PER_T / temperature), NUM - 1.0).to(tl.int32)


@triton.jit
def _perturbed(x, temperature, seed, token_ids):
    uniform = tl.maximum(tl.rand(seed, token_ids), 1e-10)
    return x / temperature + -tl.log(-tl.log(uniform))


@triton.jit
def _row_seed(row, slots_ptr, positions_ptr, seed_ptr):
    position = tl.load(positions_ptr + row).to(tl.int64)
    return tl.load(seed_ptr + tl.load(slots_ptr + row)) + position * 0x1E3779B97F4A7C15


@triton.jit
def _allowed(x, words_ptr, token_ids, V: tl.constexpr):
    """-inf for what bit v % 32 of word v // 32 forbids. NaN stays, wherever it is: such a row has failed."""
    words = tl.load(words_ptr + token_ids // 32, mask=token_ids < V, other=0)
    keep = (((words >> (token_ids % 32)) & 1) != 0) | (x != x)
    return tl.where(keep, x, float("-inf"))


@triton.jit
def _survey_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    seed_ptr,
    values_ptr,
    indices_ptr,
    peaks_ptr,
    maxima_ptr,
    masses_ptr,
    listed_ptr,
    places_ptr,
    masks_ptr,
    copies_ptr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    BUCKETS: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of a row: its best perturbed logit, or, where the row filters, the largest of every group.

    MASKED: of row places[row] of the logits, under its mask; the others need a copy of it where it filters."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature, _top_p, _min_p, _top_k, filters = _row_parameters(
        row, slots_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, V
    )
    source = row.to(tl.int64)
    words = masks_ptr
    if MASKED:
        words += source * ((V + 31) // 32)
        copy = copies_ptr + source * V
        source = tl.load(places_ptr + row)
    base = logits_ptr + source * V
    out = row * tl.num_programs(1) + chunk
    if filters:
        groups = tl.arange(0, GROUPS)
        places = chunk * CHUNK + groups[:, None] * (CHUNK // GROUPS) + tl.arange(0, CHUNK // GROUPS)[None, :]
        group_x = tl.load(base + places, mask=places < V, other=float("-inf")).to(tl.float32)
        if MASKED:
            group_x = _allowed(group_x, words, places, V)
            tl.store(copy + places, group_x, mask=places < V)
        num_nan = tl.sum(tl.sum((group_x != group_x).to(tl.int32), axis=1), axis=0)
        maxima = tl.max(group_x, axis=1)
        tl.store(maxima_ptr + out * GROUPS + groups, maxima)
        tl.store(peaks_ptr + out, tl.where(num_nan > 0, float("nan"), tl.max(maxima, axis=0)))
        tl.store(values_ptr + out, float("-inf"))
        if chunk == 0:
            tl.store(masses_ptr + row * BUCKETS + tl.arange(0, BUCKETS), tl.zeros((BUCKETS,), dtype=tl.int64))
            tl.store(listed_ptr + row, 0)
    else:
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(base + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        if MASKED:
            x = _allowed(x, words, cols, V)
        is_nan = tl.max((x != x).to(tl.int32), axis=0)
        if temperature > 0.0:
            x = _perturbed(x, temperature, _row_seed(row, slots_ptr, positions_ptr, seed_ptr), cols)
        value = tl.max(x, axis=0)
        tl.store(values_ptr + out, tl.where(is_nan > 0, float("nan"), value))
        tl.store(indices_ptr + out, tl.min(tl.where(x == value, cols, V), axis=0))


@triton.jit
def _floor(maxima_ptr, row, top_k, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """A value that at least top_k groups reach, and not many more."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(maxima_ptr + row * NUM + cols, mask=cols < NUM, other=float("-inf"))
    reached = tl.sum((x > float("-inf")).to(tl.int32), axis=0)
    low = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    high = tl.max(x, axis=0)
    low = tl.where(reached < top_k, float("-inf"), low)
    reached = tl.where(reached < top_k, top_k, reached)
    steps = 0
    while (reached > top_k + top_k // 2 + 4) & (steps < 16):
        middle = 0.5 * low + 0.5 * high
        count = tl.sum((x >= middle).to(tl.int32), axis=0)
        if count >= top_k:
            low = middle
            reached = count
        else:
            high = middle
        steps += 1
    return low


@triton.jit
def _weigh_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    peaks_ptr,
    maxima_ptr,
    masses_ptr,
    floor_ptr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BUCKETS: tl.constexpr,
    PER_T: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Only rows that filter. top_k: the first program finds the floor. top_p alone: each adds its share's masses."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    first = tl.program_id(1)
    temperature, top_p, min_p, top_k, filters = _row_parameters(
        row, slots_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, V
    )
    if filters:
        best, usable = _peak(peaks_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        if usable:
            if top_k > 0:
                if (first == 0) & (top_k <= NUM_GROUPS):
                    tl.store(floor_ptr + row, _floor(maxima_ptr, row, top_k, NUM_GROUPS, BLOCK_GROUPS))
            elif top_p < 1.0:
                base = logits_ptr + row.to(tl.int64) * V
                to = masses_ptr + row * BUCKETS
                lowest = _lowest(best, temperature, min_p)
                far = tl.zeros((PIECE,), dtype=tl.int64)
                for start in range(first * PIECE, V, tl.num_programs(1) * PIECE):
                    cols = start + tl.arange(0, PIECE)
                    x = tl.load(base + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
                    mass = tl.where(x >= lowest, _mass(x, best, temperature, SCALE), 0)
                    bucket = _bucket(x, best, temperature, BUCKETS, PER_T)
                    near = bucket < BUCKETS - 1
                    tl.atomic_add(to + bucket, mass, mask=near & (mass > 0), sem="relaxed")
                    far += tl.where(near, 0, mass)
                tl.atomic_add(to + BUCKETS - 1, tl.sum(far, axis=0), sem="relaxed")


@triton.jit
def _gather_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    seed_ptr,
    peaks_ptr,
    masses_ptr,
    floor_ptr,
    values_ptr,
    indices_ptr,
    listed_ptr,
    need_ptr,
    list_ptr,
    list_ids_ptr,
    V: tl.constexpr,
    PIECE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BUCKETS: tl.constexpr,
    PER_T: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Only rows that filter. A share of the row: lists what may or may not stay, draws among what stays for certain."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    first = tl.program_id(1)
    temperature, top_p, min_p, top_k, filters = _row_parameters(
        row, slots_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, V
    )
    if filters & (top_k <= NUM_GROUPS):
        best, usable = _peak(peaks_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        if usable:
            base = logits_ptr + row.to(tl.int64) * V
            lowest = _lowest(best, temperature, min_p)
            seed = _row_seed(row, slots_ptr, positions_ptr, seed_ptr)
            floor = lowest
            last = BUCKETS
            if top_k > 0:
                floor = tl.load(floor_ptr + row)
                last = -1
            elif top_p < 1.0:
                masses = tl.load(masses_ptr + row * BUCKETS + tl.arange(0, BUCKETS))
                need = _share(tl.sum(masses, axis=0), top_p)
                so_far = tl.cumsum(masses, axis=0)
                last = tl.sum((so_far < need).to(tl.int32), axis=0)
                if first == 0:
                    tl.store(need_ptr + row, need - tl.max(tl.where(so_far < need, so_far, 0), axis=0))
            value = float("-inf")
            index = V
            for start in range(first * PIECE, V, tl.num_programs(1) * PIECE):
                cols = start + tl.arange(0, PIECE)
                x = tl.load(base + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
                bucket = _bucket(x, best, temperature, BUCKETS, PER_T)
                possible = (x >= lowest) & (x > float("-inf"))
                certain = possible & (bucket < last)
                unsure = tl.where(top_k > 0, x >= floor, bucket == last) & possible
                count = tl.sum(unsure.to(tl.int32), axis=0)
                if count > 0:
                    place = tl.atomic_add(listed_ptr + row, count, sem="relaxed") - 1
                    place += tl.cumsum(unsure.to(tl.int32), axis=0)
                    fits = unsure & (place < LISTED)
                    tl.store(list_ptr + row * LISTED + place, x, mask=fits)
                    tl.store(list_ids_ptr + row * LISTED + place, cols, mask=fits)
                if tl.sum(certain.to(tl.int32), axis=0) > 0:
                    y = tl.where(certain, _perturbed(x, temperature, seed, cols), float("-inf"))
                    drawn = tl.max(y, axis=0)
                    if drawn > value:
                        value = drawn
                        index = tl.min(tl.where(y == drawn, cols, V), axis=0)
            tl.store(values_ptr + row * NUM_CHUNKS + first, value)
            tl.store(indices_ptr + row * NUM_CHUNKS + first, index)


@triton.jit
def _smallest_key(
    x_ptr, count, best, lowest, temperature, top_p, top_k, need, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The key (`_ordered`, without low bits) of the smallest of `count` logits that may be drawn.

    need: the mass that top_p wants of them; 0: its share of what top_k leaves."""
    cols = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -0x80000000, dtype=tl.int32)
    least = tl.full((BLOCK,), 0x7FFFFFFF, dtype=tl.int32)
    for start in range(0, count, BLOCK):
        x = tl.load(x_ptr + start + cols, mask=start + cols < count, other=float("-inf")).to(tl.float32)
        possible = (x >= lowest) & (x > float("-inf"))
        highest = tl.maximum(highest, tl.where(possible, _ordered(x), -0x80000000))
        least = tl.minimum(least, tl.where(possible, _ordered(x), 0x7FFFFFFF))
    low = tl.min(least, axis=0) >> SHIFT
    top = tl.max(highest, axis=0) >> SHIFT
    if top_k > 0:
        high = top  # the largest key that at least top_k reach is in [low, high], or low where there are fewer
        while low < high:
            middle = low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)
            reached = tl.zeros((BLOCK,), dtype=tl.int32)
            for start in range(0, count, BLOCK):
                x = tl.load(x_ptr + start + cols, mask=start + cols < count, other=float("-inf")).to(tl.float32)
                possible = (x >= lowest) & (x > float("-inf"))
                reached += (possible & ((_ordered(x) >> SHIFT) >= middle)).to(tl.int32)
            if tl.sum(reached, axis=0) >= top_k:
                low = middle
            else:
                high = middle - 1
    if top_p < 1.0:
        if need == 0:
            mass = tl.zeros((BLOCK,), dtype=tl.int64)
            for start in range(0, count, BLOCK):
                x = tl.load(x_ptr + start + cols, mask=start + cols < count, other=float("-inf")).to(tl.float32)
                kept = (x >= lowest) & (x > float("-inf")) & ((_ordered(x) >> SHIFT) >= low)
                mass += tl.where(kept, _mass(x, best, temperature, SCALE), 0)
            need = _share(tl.sum(mass, axis=0), top_p)
        high = top  # the largest key whose mass reaches `need` is in [low, high]
        while low < high:
            middle = low + ((high.to(tl.int64) - low + 1) // 2).to(tl.int32)
            mass = tl.zeros((BLOCK,), dtype=tl.int64)
            for start in range(0, count, BLOCK):
                x = tl.load(x_ptr + start + cols, mask=start + cols < count, other=float("-inf")).to(tl.float32)
                kept = (x >= lowest) & (x > float("-inf")) & ((_ordered(x) >> SHIFT) >= middle)
                mass += tl.where(kept, _mass(x, best, temperature, SCALE), 0)
            if tl.sum(mass, axis=0) >= need:
                low = middle
            else:
                high = middle - 1
    return low


@triton.jit
def _best_drawn(
    x_ptr, ids_ptr, count, low, lowest, temperature, seed, IS_LIST: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best perturbed of `count` logits whose keys are `low` or more, and its token."""
    cols = tl.arange(0, BLOCK)
    best = float("-inf")
    token_id = 0x7FFFFFFF
    for start in range(0, count, BLOCK):
        inside = start + cols < count
        x = tl.load(x_ptr + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
        token_ids = start + cols
        if IS_LIST:
            token_ids = tl.load(ids_ptr + start + cols, mask=inside, other=0x7FFFFFFF)
        kept = (x >= lowest) & (x > float("-inf")) & ((_ordered(x) >> SHIFT) >= low)
        if tl.sum(kept.to(tl.int32), axis=0) > 0:
            y = tl.where(kept, _perturbed(x, temperature, seed, token_ids), float("-inf"))
            value = tl.max(y, axis=0)
            index = tl.min(tl.where(y == value, token_ids, 0x7FFFFFFF), axis=0)
            is_better = (value > best) | ((value == best) & (index < token_id))
            best = tl.where(is_better, value, best)
            token_id = tl.where(is_better, index, token_id)
    return best, token_id


@triton.jit(do_not_specialize=["is_again"])
def _choose_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    seed_ptr,
    peaks_ptr,
    values_ptr,
    indices_ptr,
    listed_ptr,
    need_ptr,
    list_ptr,
    list_ids_ptr,
    out_ptr,
    token_ids_ptr,
    token_ids_stride,
    places_ptr,
    is_again,
    V: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the best of its chunks and of its list, to `out` and, where it can be read next, to the
    slot's token ids.

    is_again: 1: to place places[row] of `out`, unless that one has failed; 0: to place `row`. Read at run time, so that
    steps and what is drawn behind them share the kernel that takes longest to compile."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    temperature, top_p, min_p, top_k, filters = _row_parameters(
        row, slots_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, V
    )
    cols = tl.arange(0, BLOCK_CHUNKS)
    inside = cols < NUM_CHUNKS
    values = tl.load(values_ptr + row * NUM_CHUNKS + cols, mask=inside, other=float("-inf"))
    indices = tl.load(indices_ptr + row * NUM_CHUNKS + cols, mask=inside, other=0x7FFFFFFF)
    is_nan = tl.max((values != values).to(tl.int32), axis=0)
    value = tl.max(values, axis=0)
    index = tl.min(tl.where(values == value, indices, 0x7FFFFFFF), axis=0)
    if filters:
        best, usable = _peak(peaks_ptr, row, NUM_CHUNKS, BLOCK_CHUNKS)
        count = tl.load(listed_ptr + row)
        whole = (top_k > NUM_GROUPS) | (count > LISTED)
        if usable & (whole | (count > 0)):
            lowest = _lowest(best, temperature, min_p)
            seed = _row_seed(row, slots_ptr, positions_ptr, seed_ptr)
            if whole:
                nothing = tl.zeros((), dtype=tl.int64)
                base = logits_ptr + row.to(tl.int64) * V
                low = _smallest_key(
                    base, V, best, lowest, temperature, top_p, top_k, nothing, SCALE, SHIFT, BLOCK_ROW
                )  # fmt: skip
                drawn, token_id = _best_drawn(
                    base, list_ids_ptr, V, low, lowest, temperature, seed, False, SHIFT, BLOCK
                )  # fmt: skip
            else:
                need = tl.zeros((), dtype=tl.int64)
                if (top_k == 0) & (top_p < 1.0):
                    need = tl.load(need_ptr + row)
                start = row * LISTED
                low = _smallest_key(
                    list_ptr + start, count, best, lowest, temperature, top_p, top_k, need, SCALE, SHIFT, BLOCK
                )  # fmt: skip
                drawn, token_id = _best_drawn(
                    list_ptr + start, list_ids_ptr + start, count, low, lowest, temperature, seed, True, SHIFT, BLOCK
                )  # fmt: skip
            is_better = (drawn > value) | ((drawn == value) & (token_id < index))
            value = tl.where(is_better, drawn, value)
            index = tl.where(is_better, token_id, index)
    failed = (is_nan > 0) | (value == float("-inf")) | (value == float("inf"))
    place = tl.load(places_ptr + row, mask=is_again != 0, other=row)
    is_usable = tl.load(out_ptr + place, mask=is_again != 0, other=0) >= 0
    tl.store(out_ptr + place, tl.where(failed, -1, index), mask=is_usable)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    token_id = tl.where(failed, 0, index).to(tl.int64)
    tl.store(token_ids_ptr + slot * token_ids_stride + position, token_id, mask=is_usable)


_survey, _weigh, _gather = QuickLaunch(_survey_kernel), QuickLaunch(_weigh_kernel), QuickLaunch(_gather_kernel)
_choose = QuickLaunch(_choose_kernel)


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
    pdl: bool = True,
) -> torch.Tensor:
    """See `slot_ops.SampleRows`.

    Args:
        pdl: programmatic dependent launch (compute capability 9.0 and later).
    """
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    launches = _Launches(logits, slots, positions, sampling, pdl)
    launches.survey(logits)
    launches.narrow(logits)
    launches.choose(logits, out, token_ids)
    return out


def redraw_rows(
    logits: torch.Tensor,
    rows: PickedRows,
    masks: torch.Tensor | None,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
    drawn: torch.Tensor,
    filters: bool,
    pdl: bool = True,
) -> None:
    """See `slot_ops.RedrawRows`. `pdl` as above."""
    launches = _Launches(logits, rows.slots, rows.positions, sampling, pdl)
    if masks is None:
        launches.survey(logits)
    else:
        # Where no row filters nobody reads a copy, and none is written.
        copies = logits.new_empty(len(rows.slots), logits.shape[1]) if filters else logits
        launches.survey_masked(logits, rows.places, masks, copies)
        logits = copies
    if filters:
        launches.narrow(logits)
    launches.choose(logits, drawn, token_ids, rows.places)


class _Launches:
    """The launches that draw a token for each of some rows, and what they leave for one another."""

    def __init__(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampling: SlotSampling, pdl: bool
    ) -> None:
        num_rows, vocab = len(slots), logits.shape[1]
        num_chunks = ceil_div(vocab, CHUNK)
        num_groups = num_chunks * (CHUNK // GROUP)

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

        self._best = room(num_chunks), room(num_chunks, dtype=torch.int32)
        self._peaks, self._maxima, self._floor = room(num_chunks), room(num_groups), room()
        self._masses, self._need = room(BUCKETS, dtype=torch.int64), room(dtype=torch.int64)
        self._listed = room(dtype=torch.int32)
        self._lists = room(LISTED), room(LISTED, dtype=torch.int32)
        self._slots, self._places = slots, (slots, positions)
        self._filters = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
        self._seeds = sampling.seed
        self._chunks = (num_rows, num_chunks)
        self._shares = (num_rows, min(num_chunks, max(1, PROGRAMS // num_rows)))
        self._pdl = pdl
        self._groups = {"BLOCK_GROUPS": power_of_2(num_groups)}
        self._blocks = {"NUM_CHUNKS": num_chunks, "BLOCK_CHUNKS": power_of_2(num_chunks), "NUM_GROUPS": num_groups}
        self._launch = {"V": vocab, "PDL": pdl, "num_warps": 8, "launch_pdl": pdl}

    def survey(self, logits: torch.Tensor) -> None:
        """Of the rows of `logits`."""
        self._look(logits, (None, None, None), MASKED=False, **self._launch)

    def survey_masked(
        self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, copies: torch.Tensor
    ) -> None:
        """Of rows `places` of `logits` under their masks. Not a dependent launch: in front of it the stream waits for
        another one's copy, and what such a launch may overtake is a kernel."""
        self._look(logits, (places, masks, copies), MASKED=True, **(self._launch | {"launch_pdl": False}))

    def _look(self, logits: torch.Tensor, masked: tuple[torch.Tensor | None, ...], **options: Any) -> None:
        _survey[self._chunks](
            logits, *self._places, *self._filters, self._seeds, *self._best, self._peaks, self._maxima, self._masses,
            self._listed, *masked, CHUNK=CHUNK, GROUPS=CHUNK // GROUP, BUCKETS=BUCKETS, maxnreg=80, **options,
        )  # fmt: skip

    def narrow(self, logits: torch.Tensor) -> None:
        """Down to what may stay, in rows that filter."""
        _weigh[self._shares](
            logits, self._slots, *self._filters, self._peaks, self._maxima, self._masses, self._floor,
            PIECE=PIECE, BUCKETS=BUCKETS, PER_T=BUCKETS_PER_T, SCALE=MASS,
            **self._groups, **self._blocks, **self._launch,
        )  # fmt: skip
        _gather[self._shares](
            logits, *self._places, *self._filters, self._seeds, self._peaks, self._masses, self._floor, *self._best,
            self._listed, self._need, *self._lists,
            PIECE=PIECE, BUCKETS=BUCKETS, PER_T=BUCKETS_PER_T, LISTED=LISTED, maxnreg=128,
            **self._blocks, **self._launch,
        )  # fmt: skip

    def choose(
        self, logits: torch.Tensor, out: torch.Tensor, token_ids: torch.Tensor, places: torch.Tensor | None = None
    ) -> None:
        """A token a row, to `out` and to the slots; with `places` as `slot_ops.RedrawRows` has it."""
        again = (self._places[1], 0) if places is None else (places, 1)
        _choose[self._chunks[:1]](
            logits, *self._places, *self._filters, self._seeds, self._peaks, *self._best, self._listed, self._need,
            *self._lists, out, token_ids, token_ids.stride(0), *again,
            LISTED=LISTED, SCALE=MASS, SHIFT=LOW_BITS[logits.dtype], BLOCK=1024, BLOCK_ROW=8192,
            **self._blocks, **self._launch,
        )  # fmt: skip
