"""Logits to tokens for one step, and the sampling state of every slot.

Order, as in vLLM: logit_bias, then the masks of grammars, then banned ids (min_tokens), then penalties; greedy rows
take the best; the others apply temperature, top_k, min_p, top_p and draw. A ban that would leave a constrained row
nothing to sample is lifted: a finished grammar allows only the end. Log-probabilities are of the model's own logits,
before all of that.

A row depends on its own logits, parameters, seed and position only, never on the rest of the batch. What may be added:
further edits of logits. What may not: decisions about requests, or anything that waits for the host inside `sample`
on the greedy path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, TokenLogprobs
from tokenspeed.sampling.filters import MAX_VOCAB, DrawParams, draw
from tokenspeed.sampling.logprobs import PendingLogprobs, gather_logprobs
from tokenspeed.sampling.masks import TokenMasks
from tokenspeed.sampling.penalties import PenaltyCounts, has_penalties
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
    """What a slot's sequence wants. `bias_ids`, `bias` and `banned` are on the device, None where there are none."""

    sampling: SamplingParams
    seed: int
    prompt_len: int
    is_greedy: bool
    has_penalties: bool
    bias_ids: Tensor | None
    bias: Tensor | None
    banned: Tensor | None


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
        self._vocab_size = vocab_size
        self._device = device
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        with torch.inference_mode():
            self._counts = PenaltyCounts(vocab_size, device)

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot; whatever the slot held is forgotten. Token ids beyond the vocabulary in logit_bias
        or banned ids name no logit and have no effect."""
        sampling = admission.sampling
        if sampling.seed is None:
            raise ValueError(f"request {admission.request_id} was admitted without a seed")
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if token_id < self._vocab_size}
        banned = [token_id for token_id in admission.banned_token_ids if 0 <= token_id < self._vocab_size]
        if not sampling.min_tokens:
            banned = []
        penalised = has_penalties(sampling)
        self._slots[admission.slot] = _Slot(
            sampling=sampling,
            seed=sampling.seed,
            prompt_len=admission.prompt_len,
            is_greedy=sampling.is_greedy,
            has_penalties=penalised,
            bias_ids=to_device(list(bias), torch.int64, self._device) if bias else None,
            bias=to_device(list(bias.values()), torch.float32, self._device) if bias else None,
            banned=to_device(banned, torch.int64, self._device) if banned else None,
        )
        if penalised:
            tokens, prompt_len = admission.token_ids, admission.prompt_len
            self._counts.admit(admission.slot, tokens[:prompt_len], tokens[prompt_len:])
        else:
            self._counts.release(admission.slot)

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
        work = self._edited(logits, states, slots, positions, masks)
        if work is not logits:
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
        counted = [row for row, state in enumerate(states) if state.has_penalties]
        if counted:
            index = to_device(counted, torch.int64, self._device)
            self._counts.count([slots[row] for row in counted], token_ids[index])
        asked = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        return SampledBatch(token_ids, failed, self._logprobs(logits, token_ids, asked, states), tuple(asked))

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise ValueError(f"slot {slot} was never admitted")
        return state

    def _edited(
        self, logits: Tensor, states: list[_Slot], slots: list[int], positions: list[int], masks: TokenMasks | None
    ) -> Tensor:
        """Logits after bias, masks, bans and penalties: a copy if there are any, else the same tensor."""
        banning = [
            row
            for row, state in enumerate(states)
            if state.banned is not None and positions[row] - state.prompt_len < state.sampling.min_tokens
        ]
        biased = [row for row, state in enumerate(states) if state.bias_ids is not None]
        penalised = [row for row, state in enumerate(states) if state.has_penalties]
        if not (banning or biased or penalised or masks):
            return logits
        work = logits.clone()
        for row in biased:
            state = states[row]
            assert state.bias_ids is not None and state.bias is not None
            work[row].index_add_(0, state.bias_ids, state.bias)
        if masks is not None:
            masks.apply(work)
        constrained = set(masks.rows) if masks is not None else set()
        for row in banning:
            banned = states[row].banned
            assert banned is not None
            if row in constrained:
                without = work[row].index_fill(0, banned, -torch.inf)
                work[row] = torch.where(without.isfinite().any(), without, work[row])
            else:
                work[row].index_fill_(0, banned, -torch.inf)
        if penalised:
            params = [states[row].sampling for row in penalised]
            self._counts.apply(work, penalised, [slots[row] for row in penalised], params)
        return work

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
