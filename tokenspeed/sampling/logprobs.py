"""Log-probabilities of tokens under the model's own logits, and of the best alternatives.

`gather_logprobs` runs on the device and does not wait; its `finish` reads the result on the host. Rows are processed a
few at a time, so that memory stays small however long a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.protocol.step import TokenLogprobs
from tokenspeed.sampling.chunks import row_chunks


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities still on the device.

    Fields:
        token_ids: [N] int64.
        logprobs: [N] float32, of token_ids.
        ranks: [N] int64, 1 = the most likely.
        top_ids, top_logprobs: [N, max(k)] int64 and float32, best first.
        ks: how many of the best each row wants.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    ks: tuple[int, ...]

    def finish(self) -> list[TokenLogprobs]:
        """Wait and convert, one entry a row."""
        columns = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            self.ks,
            strict=True,
        )
        return [
            TokenLogprobs(token_id, logprob, rank, top_ids[:k], top_logprobs[:k])
            for token_id, logprob, rank, top_ids, top_logprobs, k in columns
        ]


def gather_logprobs(logits: Tensor, token_ids: Tensor, ks: Sequence[int]) -> PendingLogprobs:
    """Start the computation.

    Args:
        logits: [N, V], the model's own; read before the call returns on a CPU, in stream order on a GPU.
        token_ids: [N] int64, on the same device.
        ks: how many of the best tokens each row wants, N numbers.
    """
    width = min(max(ks, default=0), logits.shape[-1])
    chunks = list(row_chunks(len(ks), logits.shape[-1], logits.device)) or [slice(0, 0)]
    parts = [_gather_chunk(logits[rows], token_ids[rows], width) for rows in chunks]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return PendingLogprobs(token_ids, logprobs, ranks, top_ids, top_logprobs, tuple(ks))


def _gather_chunk(logits: Tensor, token_ids: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = logits.float()
    normalizer = values.logsumexp(-1, keepdim=True)
    own = values.gather(-1, token_ids[:, None])
    ranks = (values > own).sum(-1) + 1
    top_values, top_ids = values.topk(width, dim=-1)
    return (own - normalizer).squeeze(-1), ranks, top_ids, top_values - normalizer


def token_logprobs(logits: Tensor, token_ids: Tensor, ks: Sequence[int]) -> list[TokenLogprobs]:
    """`gather_logprobs` and `finish` in one.

    Args:
        logits: [N, V]. token_ids: [N] int64. ks: N numbers, see there.
    """
    return gather_logprobs(logits, token_ids, ks).finish()
