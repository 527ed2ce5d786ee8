"""From logits to a drawn token: temperature, top-k, min-p, top-p, inverse of the distribution function.

Probabilities become integers, `floor(2**44 * exp((logit - max) / temperature))`. Integer sums do not depend on the
order of addition, so a row's token is the same whatever batch, thread count or device it is computed in. The error is
at most vocabulary * 2**-44 of the best token's probability, about 1e-8.

Filters keep ties: every token as likely as the last one that fits stays. So what is kept depends on values alone, not
on the order in which a sort leaves equal ones, and no filter needs more than a threshold.

Bytes (V entries a row, 4 B logits): about 6 passes over the row without filters, one `topk` more for each of top-k and
top-p. The full sort is the last resort, for flat distributions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_BITS = 44
"""The best token's weight is exp(0) = 2**44."""

MAX_VOCAB = (1 << (63 - WEIGHT_BITS)) - 1
"""Half a million: the sum of so many weights still fits int64."""

_TOP_P_STEPS = (64, 1024)
"""Sizes of the partial sorts tried before a full one; a language model's nucleus is usually below the first."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Parameters of the rows to draw, each a list with one value a row: see `SamplingParams`. `uniform` in [0, 1)."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    uniform: list[float]


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [M, V] float32, already biased and penalised; -inf = impossible. Not changed.

    Returns:
        [M] int64. Rows with NaN or without a finite logit give an arbitrary id in [0, V).
    """
    vocab_size = logits.shape[-1]
    weights = _weights(logits, params.temperature)
    k_rows = [row for row, k in enumerate(params.top_k) if 0 < k < vocab_size]
    if k_rows:
        _keep_top_k(logits, weights, k_rows, [params.top_k[row] for row in k_rows])
    if any(params.min_p):
        floor = torch.tensor([[p] for p in params.min_p], dtype=torch.float64, device=logits.device) * 2.0**WEIGHT_BITS
        weights.masked_fill_(weights < floor, 0)
    p_rows = [row for row, p in enumerate(params.top_p) if p < 1.0]
    if p_rows:
        _keep_top_p(weights, p_rows, [params.top_p[row] for row in p_rows])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = (torch.tensor(params.uniform, dtype=torch.float64, device=logits.device)[:, None] * total).long()
    # Rounding in double may reach the total itself, which no token's interval contains.
    target = torch.minimum(target, total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=vocab_size - 1)


def _weights(logits: Tensor, temperature: list[float]) -> Tensor:
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= torch.tensor([[value] for value in temperature], dtype=torch.float32, device=logits.device)
    return scaled.exp_().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def _keep_top_k(logits: Tensor, weights: Tensor, rows: list[int], ks: list[int]) -> None:
    """Zero the weights of tokens below each row's k-th best logit."""
    index = _row_index(rows, logits)
    best = _select(logits, index).topk(max(ks), dim=-1).values
    kth = best.gather(-1, torch.tensor([[k - 1] for k in ks], device=logits.device))
    if index is None:
        weights.masked_fill_(logits < kth, 0)
    else:
        weights[index] = weights[index].masked_fill_(logits[index] < kth, 0)


def _keep_top_p(weights: Tensor, rows: list[int], top_p: list[float]) -> None:
    """Zero the weights outside each row's nucleus: the fewest best tokens whose weights reach top_p of all."""
    index = _row_index(rows, weights)
    chosen = _select(weights, index)
    share = torch.tensor(top_p, dtype=torch.float64, device=weights.device)
    total = chosen.sum(-1)
    need = torch.minimum((share * total).ceil().long().clamp_(min=1), total)
    threshold = _nucleus_thresholds(chosen, need[:, None])
    if index is None:
        weights.masked_fill_(weights < threshold, 0)
    else:
        weights[index] = chosen.masked_fill_(chosen < threshold, 0)


def _nucleus_thresholds(weights: Tensor, need: Tensor) -> Tensor:
    """The least weight inside the nucleus, [M, 1]: the largest weights down to it sum to `need` or more."""
    vocab_size = weights.shape[-1]
    threshold = torch.empty_like(need)
    open_rows = torch.arange(weights.shape[0], device=weights.device)
    for size in (*_TOP_P_STEPS, vocab_size):
        part = weights if len(open_rows) == weights.shape[0] else weights[open_rows]
        wanted = need[open_rows]
        if size < vocab_size:
            best = part.topk(size, dim=-1).values
        else:
            best = part.sort(dim=-1, descending=True).values
        sums = best.cumsum(-1)
        last = torch.searchsorted(sums, wanted).clamp_(max=best.shape[-1] - 1)
        threshold[open_rows] = best.gather(-1, last)
        # A row whose partial sort ends before its nucleus does goes on to the next size. (Waits for the device.)
        open_rows = open_rows[(sums[:, -1:] < wanted).squeeze(-1)]
        if len(open_rows) == 0 or size >= vocab_size:
            break
    return threshold


def _row_index(rows: list[int], like: Tensor) -> Tensor | None:
    """Rows as an index tensor, or None when they are all rows, which needs no copy."""
    return None if len(rows) == like.shape[0] else torch.tensor(rows, device=like.device)


def _select(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[index]
