"""Sampling parameters of every slot on the device, and which slots the decode graph cannot serve by itself.

The graph draws by temperature, top_k, top_p, min_p and seed. What edits logits (penalties, bias, banned tokens) or
reports them (logprobs) takes the eager sampler, after the graph, for those rows alone.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.triton.sampling import SlotSampling
from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission


class SlotParameters:
    """`SlotSampling` for `num_slots` slots, updated by admissions. Slots start out greedy."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.sampling = SlotSampling(
            temperature=torch.zeros(num_slots, dtype=torch.float32, device=device),
            top_p=torch.ones(num_slots, dtype=torch.float32, device=device),
            min_p=torch.zeros(num_slots, dtype=torch.float32, device=device),
            top_k=torch.zeros(num_slots, dtype=torch.int32, device=device),
            seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        )
        self._eager: set[int] = set()

    def admit(self, admission: Admission) -> None:
        """Take over a sequence's parameters; `seed` is set in every admission."""
        wanted, slot = admission.sampling, admission.slot
        assert wanted.seed is not None, "an admission always carries its seed"
        temperature = 0.0 if wanted.is_greedy else wanted.temperature
        device = self._device
        values = to_device([temperature, wanted.top_p, wanted.min_p], torch.float32, device)
        whole = to_device([max(wanted.top_k, 0), wanted.seed], torch.int64, device)
        sampling = self.sampling
        for column, target in enumerate((sampling.temperature, sampling.top_p, sampling.min_p)):
            target[slot : slot + 1] = values[column : column + 1]
        sampling.top_k[slot : slot + 1] = whole[:1]
        sampling.seed[slot : slot + 1] = whole[1:]
        if needs_eager_sampler(wanted, admission.banned_token_ids):
            self._eager.add(slot)
        else:
            self._eager.discard(slot)

    def eager_rows(self, slots: list[int]) -> list[int]:
        """Indices into `slots` whose rows the eager sampler must do."""
        if not self._eager:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._eager]


def needs_eager_sampler(sampling: SamplingParams, banned_token_ids: tuple[int, ...]) -> bool:
    """True when the request edits logits or asks for them."""
    return (
        sampling.logprobs is not None
        or bool(sampling.logit_bias)
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
        or (sampling.min_tokens > 0 and bool(banned_token_ids))
    )
