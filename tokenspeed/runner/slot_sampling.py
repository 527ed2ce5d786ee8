"""Sampling parameters of every slot on the device, for the kernel that draws; who filters, who wants logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.kernels.slot_ops import SlotSampling
from tokenspeed.kernels.upload import to_device
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
        self._num_logprobs: dict[int, int] = {}
        self._filtering: set[int] = set()

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
        if temperature > 0 and (wanted.top_p < 1 or wanted.min_p > 0 or wanted.top_k > 0):
            self._filtering.add(slot)
        else:
            self._filtering.discard(slot)
        if wanted.logprobs is None:
            self._num_logprobs.pop(slot, None)
        else:
            self._num_logprobs[slot] = wanted.logprobs

    def filter_any(self, slots: Sequence[int]) -> bool:
        """Whether one of them has top_k, top_p or min_p, and is not greedy."""
        return not self._filtering.isdisjoint(slots)

    def logprob_rows(self, slots: Sequence[int]) -> dict[int, int]:
        """Places in `slots` that want the log-probability of their token -> how many alternatives besides."""
        if self._num_logprobs.keys().isdisjoint(slots):
            return {}
        return {row: self._num_logprobs[slot] for row, slot in enumerate(slots) if slot in self._num_logprobs}
