"""Token counts of the sequences that asked for penalties, and the penalties themselves. All on the device.

A sequence gets a row of counts when it is admitted with a penalty; the pool of rows grows with the number of such
sequences and costs V * 5 bytes for each. Nobody else pays.

    repetition  (CTRL, arXiv 1909.05858, section 4.1)   x / r if x > 0 else x * r,  for tokens in prompt or output
    frequency, presence (OpenAI)                        x - f * count - p * (count > 0),  count over the output
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.sampling.chunks import row_chunks


def has_penalties(sampling: SamplingParams) -> bool:
    """True when the request needs counts."""
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0 or sampling.repetition_penalty != 1.0


class PenaltyCounts:
    """Counts by slot.

    Args:
        vocab_size: V. device: where counts and logits live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows in the pool, used or free."""
        return self._output.shape[0]

    def release(self, slot: int) -> None:
        """The slot holds another sequence now. Unknown slots are ignored."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def admit(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start counting for a slot, from the tokens known now."""
        self.release(slot)
        if not self._free:
            self._grow()
        row = self._row_of[slot] = self._free.pop()
        # Not bincount, nor an index of Python values: those wait for a GPU.
        output = to_device(output_ids, torch.int64, self._device)
        self._output[row].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        prompt = to_device(prompt_ids, torch.int64, self._device)
        self._in_prompt[row].zero_().scatter_(0, prompt, torch.ones_like(prompt, dtype=torch.bool))

    def apply(self, logits: Tensor, rows: list[int], slots: list[int], params: list[SamplingParams]) -> None:
        """Change `logits` [N, V] in place at `rows`, which belong to `slots` (admitted here)."""
        index = to_device(rows, torch.int64, self._device)
        pool = self._pool_rows(slots)
        for part in row_chunks(len(rows), logits.shape[-1], self._device):
            logits[index[part]] = self._penalised(logits[index[part]], pool[part], params[part])

    def _penalised(self, values: Tensor, pool: Tensor, params: list[SamplingParams]) -> Tensor:
        counts = self._output[pool]
        in_output = counts > 0
        if any(p.repetition_penalty != 1.0 for p in params):
            repetition = self._column([p.repetition_penalty for p in params])
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(self._in_prompt[pool] | in_output, repeated, values)
        if any(p.frequency_penalty for p in params):
            values -= self._column([p.frequency_penalty for p in params]) * counts
        if any(p.presence_penalty for p in params):
            values -= self._column([p.presence_penalty for p in params]) * in_output
        return values

    def count(self, slots: list[int], token_ids: Tensor) -> None:
        """Add one sampled token a slot; `token_ids` [len(slots)] int64 on the device."""
        places = self._pool_rows(slots) * self._output.shape[-1] + token_ids
        self._output.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _pool_rows(self, slots: list[int]) -> Tensor:
        return to_device([self._row_of[slot] for slot in slots], torch.int64, self._device)

    def _column(self, values: list[float]) -> Tensor:
        return to_device(values, torch.float32, self._device)[:, None]

    def _grow(self) -> None:
        have = self.num_rows
        more = max(4, have)
        self._output = torch.cat((self._output, self._output.new_zeros(more, self._output.shape[-1])))
        self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(more, self._in_prompt.shape[-1])))
        self._free.extend(range(have + more - 1, have - 1, -1))
