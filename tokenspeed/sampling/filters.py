"""From logits to a drawn token, on a CPU: temperature, top-k, min-p, top-p, inverse of the distribution function.

Probabilities become integers, `floor(2**44 * exp((logit - max) / temperature))`. Integer sums do not depend on the
order of addition, so a row's token is the same whatever batch or thread count it is computed with. The error is at most
vocabulary * 2**-44 of the best token's probability, about 1e-8.

Filters keep ties: every token as likely as the last one that fits stays. So what is kept depends on values alone, not
on the order in which a sort leaves equal ones, and no filter needs more than a threshold.

Cost: about six passes over a row without filters; top-k adds a selection, top-p the sort of a small part of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed.kernels.upload import to_device
from tokenspeed.sampling.chunks import row_chunks

WEIGHT_BITS = 44
"""The best token's weight is exp(0) = 2**44."""

MAX_VOCAB = (1 << (63 - WEIGHT_BITS)) - 1
"""Half a million: the sum of so many weights still fits int64."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of the rows to draw, each a list with one value a row: see `SamplingParams`. `uniform` in [0, 1)."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    uniform: list[float]

    def rows(self, rows: slice) -> DrawParams:
        """Those of some rows."""
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [M, V] float32, already biased and penalised; -inf = impossible. Not changed.

    Returns:
        [M] int64. Rows with NaN or without a finite logit give an arbitrary id in [0, V).
    """
    num_rows, vocab_size = logits.shape
    drawn = [_draw_rows(logits[rows], params.rows(rows)) for rows in row_chunks(num_rows, vocab_size, logits.device)]
    return torch.cat(drawn)


def _draw_rows(logits: Tensor, params: DrawParams) -> Tensor:
    vocab_size = logits.shape[-1]
    weights = _weights(logits, params.temperature)
    k_rows = [row for row, k in enumerate(params.top_k) if 0 < k < vocab_size]
    if k_rows:
        _keep_top_k(logits, weights, k_rows, [params.top_k[row] for row in k_rows])
    if any(params.min_p):
        floor = to_device([[p] for p in params.min_p], torch.float64, logits.device) * 2.0**WEIGHT_BITS
        # A whole number is below `floor` when it is below the next whole number: no pass in double is needed.
        weights.masked_fill_(weights < floor.ceil().long(), 0)
    p_rows = [row for row, p in enumerate(params.top_p) if p < 1.0]
    if p_rows:
        _keep_top_p(weights, p_rows, [params.top_p[row] for row in p_rows])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = (to_device(params.uniform, torch.float64, logits.device)[:, None] * total).long()
    # Rounding in double may reach the total itself, which no token's interval contains.
    target = torch.minimum(target, total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _weights(logits: Tensor, temperature: list[float]) -> Tensor:
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= to_device([[value] for value in temperature], torch.float32, logits.device)
    return scaled.exp_().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def _keep_top_k(logits: Tensor, weights: Tensor, rows: list[int], ks: list[int]) -> None:
    """Zero the weights of tokens below each row's k-th best logit."""
    index = _row_index(rows, logits)
    chosen = _select(logits, index)
    kth = kth_largest(chosen, ks)
    if index is None:
        weights.masked_fill_(logits < kth, 0)
    else:
        weights[index] = weights[index].masked_fill_(chosen < kth, 0)


def _keep_top_p(weights: Tensor, rows: list[int], top_p: list[float]) -> None:
    """Zero the weights outside each row's nucleus: the fewest best tokens whose weights reach top_p of all."""
    index = _row_index(rows, weights)
    chosen = _select(weights, index)
    share = to_device(top_p, torch.float64, weights.device)
    total = chosen.sum(-1)
    need = torch.minimum((share * total).ceil().long().clamp_(min=1), total)
    least = nucleus(chosen, need)
    if index is None:
        weights.masked_fill_(weights < least, 0)
    else:
        weights[index] = chosen.masked_fill_(chosen < least, 0)


def kth_largest(values: Tensor, ks: list[int]) -> Tensor:
    """The k-th largest entry of each row of [M, V], as [M, 1]. NumPy's vectorised selection takes 40 us for 49152
    entries whatever k is, torch's topk 200 us for k = 1024."""
    size = values.shape[-1]
    kth = [[np.partition(row, size - k)[size - k]] for row, k in zip(values.numpy(), ks, strict=True)]
    return torch.from_numpy(np.array(kth))


def nucleus(weights: Tensor, need: Tensor) -> Tensor:
    """The least weight inside each row's nucleus: the largest weights of [M, V] down to it sum to `need` [M] or more.

    Weights up to (total - need) / V are outside: all of them together are at most total - need, so the others reach
    `need` without them. Only the few above are sorted.
    """
    least = []
    for row, wanted in zip(weights.numpy(), need.tolist(), strict=True):
        heavy = row.compress(row > (int(row.sum()) - wanted) // len(row))
        heavy = np.sort(heavy)[::-1]
        least.append([heavy[np.searchsorted(heavy.cumsum(), wanted)] if heavy.size else 0])
    return torch.tensor(least, dtype=torch.int64)


def _row_index(rows: list[int], like: Tensor) -> Tensor | None:
    """Rows as an index tensor, or None when they are all rows, which needs no copy."""
    return None if len(rows) == like.shape[0] else to_device(rows, torch.int64, like.device)


def _select(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[index]
