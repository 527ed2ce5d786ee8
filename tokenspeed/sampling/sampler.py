"""Logits to tokens for one step on a CPU, and the sampling state of every slot. (A GPU draws by a kernel:
`kernels.triton.sampling`, with other random numbers.)

Order, as in vLLM: `edits`, then greedy rows take the best; the others apply temperature, top_k, min_p, top_p and draw.
Log-probabilities are of the model's own logits, before all of that.

A row depends on its own logits, parameters, seed and position only, never on the rest of the batch. What may be added:
further edits of logits. What may not: decisions about requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, TokenLogprobs
from tokenspeed.sampling.edits import LogitEdits
from tokenspeed.sampling.filters import MAX_VOCAB, DrawParams, draw
from tokenspeed.sampling.logprobs import PendingLogprobs, gather_logprobs
from tokenspeed.sampling.masks import TokenMasks
from tokenspeed.sampling.uniform import uniform

NAN_LOGITS = "NaN logits"
"""`RowSample.error` of a row whose logits are NaN, infinite, or all -inf."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """One row's outcome on the host. With `error` set, token_id is 0 and means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """A step's outcome, still on the device.

    Fields:
        token_ids: [N] int64 on the device, in the order of the logits; 0 where failed.
        failed: [N] bool on the device.
        logprobs, logprob_rows: of the rows that asked.
    """

    token_ids: Tensor
    failed: Tensor
    logprobs: PendingLogprobs | None
    logprob_rows: tuple[int, ...]

    def finish(self) -> list[RowSample]:
        """Wait for the device and convert."""
        asked: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            asked = dict(zip(self.logprob_rows, self.logprobs.finish(), strict=True))
        rows = zip(self.token_ids.tolist(), self.failed.tolist(), strict=True)
        return [
            RowSample(0, error=NAN_LOGITS) if failed else RowSample(token_id, asked.get(row))
            for row, (token_id, failed) in enumerate(rows)
        ]


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a slot's sequence wants."""

    sampling: SamplingParams
    seed: int
    is_greedy: bool


class Sampler:
    """Samples for up to `max_num_seqs` slots.

    Args:
        vocab_size: V, columns of the logits.
        device: where logits come from and sampling state lives.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        if vocab_size > MAX_VOCAB:
            raise ValueError(
                f"the sampler's integer sums hold up to {MAX_VOCAB} tokens, the vocabulary has {vocab_size}"
            )
        self._device = device
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self._edits = LogitEdits(vocab_size, device)

    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot; whatever the slot held is forgotten."""
        sampling = admission.sampling
        if sampling.seed is None:
            raise ValueError(f"request {admission.request_id} was admitted without a seed")
        self._slots[admission.slot] = _Slot(sampling, sampling.seed, sampling.is_greedy)
        self._edits.admit(admission)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, slots: list[int], positions: list[int], masks: TokenMasks | None = None
    ) -> SampledBatch:
        """Choose the next token of each row.

        Args:
            logits: [N, V] float32, not changed.
            slots: the N admitted slots the rows belong to, each at most once.
            positions: of the tokens to sample: how many tokens each sequence has now.
            masks: what constrained rows may sample.
        """
        states = [self._state(slot) for slot in slots]
        best, token_ids = logits.max(dim=-1)  # NaN wins a maximum, so `best` also tells which rows have failed
        failed = ~best.isfinite()
        work = logits
        if masks is not None or self._edits.due(self._edits.places(slots), slots, positions):
            work = logits.clone()
            self._edits.apply(work, slots, positions, masks)
            token_ids = work.max(dim=-1).indices
        random = [row for row, state in enumerate(states) if not state.is_greedy]
        if random:
            params = _draw_params([states[row] for row in random], [positions[row] for row in random])
            if len(random) == len(states):
                token_ids = draw(work, params)
            else:
                index = to_device(random, torch.int64, self._device)
                token_ids[index] = draw(work[index], params)
        token_ids.masked_fill_(failed, 0)
        self._edits.count(slots, token_ids)
        asked = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        return SampledBatch(token_ids, failed, self._logprobs(logits, token_ids, asked, states), tuple(asked))

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise ValueError(f"slot {slot} was never admitted")
        return state

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: list[int], states: list[_Slot]
    ) -> PendingLogprobs | None:
        if not rows:
            return None
        ks = [states[row].sampling.logprobs or 0 for row in rows]
        if len(rows) == len(states):
            return gather_logprobs(logits, token_ids, ks)
        index = to_device(rows, torch.int64, self._device)
        return gather_logprobs(logits[index], token_ids[index], ks)


def _draw_params(states: list[_Slot], positions: list[int]) -> DrawParams:
    sampling = [state.sampling for state in states]
    return DrawParams(
        temperature=[params.temperature for params in sampling],
        top_k=[params.top_k for params in sampling],
        top_p=[params.top_p for params in sampling],
        min_p=[params.min_p for params in sampling],
        uniform=[uniform(state.seed, position) for state, position in zip(states, positions, strict=True)],
    )
