"""bfloat16 matmuls of many rows by oneDNN, whose bits do not depend on the number of rows.

oneDNN makes a program for each number of rows, and cuts the sum over the columns as suits that number: its AMX programs
for 80 and for 160 rows of one weight may add up in another order (which do depends on oneDNN's version, the weight's
shape and the number of threads; its AVX-512 programs never did). So each shape is tried once for which numbers of rows
agree, and a matmul is made of pieces of those sizes. Most often that is the one piece that it would have been.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

SIZES = (80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Rows of a piece. Fewer rows than the smallest are left to oneDNN as they are."""

CALL_ROWS = 270
"""What a piece costs beside its rows, in rows: 512 rows take 2.2 times as long as 80 (2 cores with AMX, one thread or
two, the shapes of a 135M model)."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.Linear`. From `SIZES[0]` rows on, a row's result depends on that row alone.

    Args:
        x: [T, in] bfloat16.
        weight: [out, in] bfloat16.
    """
    rows = x.shape[0]
    if rows < SIZES[0]:
        return functional.linear(x, weight, bias)
    sizes = agreeing_sizes(weight.shape[1], weight.shape[0], bias is not None, torch.get_num_threads())
    if rows in sizes:
        return functional.linear(x, weight, bias)
    if rows < sizes[0]:
        return functional.linear(functional.pad(x, (0, 0, 0, sizes[0] - rows)), weight, bias)[:rows]
    out = x.new_empty(rows, weight.shape[0])
    columns = weight.t()
    for start, end in pieces(rows, sizes):
        if bias is None:
            torch.mm(x[start:end], columns, out=out[start:end])
        else:
            torch.addmm(bias, x[start:end], columns, out=out[start:end])
    return out


def pieces(rows: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranges of those sizes that cover `rows`, at least the smallest size. The last may cover rows a second time.

    >>> pieces(500, (80, 96, 192))
    [(0, 192), (192, 384), (384, 480), (420, 500)]
    """
    taken, done = [], 0
    while done < rows:
        left = rows - done
        if left < sizes[0]:
            taken.append((rows - sizes[0], rows))
            break
        size = max(size for size in sizes if size <= left)
        taken.append((done, done + size))
        done += size
    return taken


@cache
def agreeing_sizes(in_features: int, out_features: int, has_bias: bool, num_threads: int) -> tuple[int, ...]:
    """The cheapest of the sets of sizes whose programs give the same bits, rising.

    Tried on sums whose terms cancel: what is left is rounding, so another order of adding up shows in every output.

    Args:
        num_threads: torch's, at present.
    """
    assert num_threads == torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)
    half = in_features // 2
    order = torch.randperm(half, generator=generator)
    values = torch.randn(65, half, generator=generator)
    values = functional.pad(torch.cat((values, values[:, order]), dim=1), (0, in_features - 2 * half))
    values[0, half:] *= -1
    values = values.to(torch.bfloat16)
    weight = values[1:].repeat(-(-out_features // 64), 1)[:out_features]
    bias = torch.zeros(out_features, dtype=torch.bfloat16) if has_bias else None
    found: list[tuple[torch.Tensor, list[int]]] = []
    for size in SIZES:
        results = functional.linear(values[:1].expand(size, -1).contiguous(), weight, bias)
        if not torch.equal(results, results[:1].expand(size, -1)):
            continue  # a row's place would matter
        for first, sizes in found:
            if torch.equal(first, results[0]):
                sizes.append(size)
                break
        else:
            found.append((results[0], [size]))
    return min((tuple(sizes) for _, sizes in found), key=_cost, default=SIZES)


def _cost(sizes: tuple[int, ...]) -> float:
    """Of all numbers of rows in `SIZES`, against one piece each."""
    total = 0.0
    for rows in SIZES:
        taken = pieces(max(rows, sizes[0]), sizes)
        total += sum(CALL_ROWS + end - start for start, end in taken) / (CALL_ROWS + rows)
    return total
