"""What changes a row's logits before a token is drawn: bias, grammars' masks, banned tokens, penalties, in that order.

State by slot, on the device; nothing here waits for it. Not here: drawing, log-probabilities, decisions about requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission
from tokenspeed.sampling.masks import TokenMasks
from tokenspeed.sampling.penalties import PenaltyCounts, has_penalties

Positions = Sequence[int] | Mapping[int, int]
"""Where the token stands that a row samples, by row; those rows have one that are asked about."""


@dataclass(frozen=True, slots=True)
class _Edits:
    """What a slot's sequence wants. `bias_ids`, `bias` and `banned` are on the device, None where there are none.

    banned_until: the position from which on `banned` may be sampled.
    """

    sampling: SamplingParams
    has_penalties: bool
    bias_ids: Tensor | None
    bias: Tensor | None
    banned: Tensor | None
    banned_until: int

    def is_due(self, position: int) -> bool:
        """Whether they change the logits of a token at this position."""
        return self.has_penalties or self.bias is not None or position < self.banned_until


class LogitEdits:
    """Edits by slot. Slots without any cost nothing.

    Args:
        vocab_size: V, columns of the logits.
        device: where logits come from and counts live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, _Edits] = {}
        with torch.inference_mode():
            self._counts = PenaltyCounts(vocab_size, device)

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot; whatever the slot held is forgotten. Token ids beyond the vocabulary in logit_bias
        or banned ids name no logit and have no effect."""
        sampling, slot = admission.sampling, admission.slot
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if token_id < self._vocab_size}
        banned = [token_id for token_id in admission.banned_token_ids if 0 <= token_id < self._vocab_size]
        if not sampling.min_tokens:
            banned = []
        penalised = has_penalties(sampling)
        if penalised:
            tokens, prompt_len = admission.token_ids, admission.prompt_len
            self._counts.admit(slot, tokens[:prompt_len], tokens[prompt_len:])
        else:
            self._counts.release(slot)
        if not (bias or banned or penalised):
            self._slots.pop(slot, None)
            return
        self._slots[slot] = _Edits(
            sampling=sampling,
            has_penalties=penalised,
            bias_ids=to_device(list(bias), torch.int64, self._device) if bias else None,
            bias=to_device(list(bias.values()), torch.float32, self._device) if bias else None,
            banned=to_device(banned, torch.int64, self._device) if banned else None,
            banned_until=admission.prompt_len + sampling.min_tokens,
        )

    def places(self, slots: Sequence[int]) -> list[int]:
        """Places in `slots` that have edits, at some position. A slot keeps them until it is filled again, but they
        cost nothing in steps without it."""
        if self._slots.keys().isdisjoint(slots):
            return []
        return [row for row, slot in enumerate(slots) if slot in self._slots]

    def due(self, places: Sequence[int], slots: Sequence[int], positions: Positions) -> list[int]:
        """Those of `places` (see there) whose logits have to be edited, for tokens at `positions`."""
        return [row for row in places if self._slots[slots[row]].is_due(positions[row])]

    def apply(self, logits: Tensor, slots: Sequence[int], positions: Positions, masks: TokenMasks | None) -> None:
        """Edit `logits` [N, V] float32 in place.

        Args:
            slots: the N slots the rows belong to. positions: of the tokens to sample.
            masks: what constrained rows may sample. A ban that would leave such a row nothing is lifted: a finished
                grammar allows only the end.
        """
        states = [(row, self._slots[slot]) for row, slot in enumerate(slots) if slot in self._slots]
        for row, edits in states:
            if edits.bias_ids is not None and edits.bias is not None:
                logits[row].index_add_(0, edits.bias_ids, edits.bias)
        if masks is not None:
            masks.apply(logits)
        constrained = set(masks.rows) if masks is not None else set()
        for row, edits in states:
            if edits.banned is None or positions[row] >= edits.banned_until:
                continue
            if row in constrained:
                without = logits[row].index_fill(0, edits.banned, -torch.inf)
                logits[row] = torch.where(without.isfinite().any(), without, logits[row])
            else:
                logits[row].index_fill_(0, edits.banned, -torch.inf)
        penalised = [(row, edits.sampling) for row, edits in states if edits.has_penalties]
        if penalised:
            rows, params = [row for row, _ in penalised], [sampling for _, sampling in penalised]
            self._counts.apply(logits, rows, [slots[row] for row in rows], params)

    def count(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Tokens were sampled for `slots`: [N] on the device, of any integer type; what is below 0 has failed."""
        counted = [row for row, slot in enumerate(slots) if (edits := self._slots.get(slot)) and edits.has_penalties]
        if not counted:
            return
        if len(counted) < len(slots):
            token_ids = token_ids[to_device(counted, torch.int64, self._device)]
        self._counts.count([slots[row] for row in counted], token_ids.long().clamp(min=0))
