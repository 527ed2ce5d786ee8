"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.models.interface import Model
from tokenspeed.protocol.step import Admission, Row, TokenLogprobs
from tokenspeed.sampling.logprobs import PendingLogprobs, gather_logprobs

ROWS = 256  # rows of [rows, vocab] float32 logits alive at once: 50 MB at a vocabulary of 49k


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """One chunk's values, on the device."""

    parts: list[PendingLogprobs]

    def finish(self) -> list[TokenLogprobs]:
        """Wait and convert: one entry a prompt token that follows a position of the row."""
        return [entry for part in self.parts for entry in part.finish()]


class PromptLogprobs:
    """Which slots asked, and the computation for a row of such a slot.

    Args:
        token_ids: [S, L] int64, the runner's own; read when a row is launched.
    """

    def __init__(self, model: Model, token_ids: torch.Tensor) -> None:
        self._model = model
        self._token_ids = token_ids
        self._wanted: dict[int, tuple[int, int]] = {}  # slot -> (prompt_len, how many alternatives)

    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot."""
        num_top = admission.sampling.prompt_logprobs
        if num_top is None:
            self._wanted.pop(admission.slot, None)
        else:
            self._wanted[admission.slot] = (admission.prompt_len, num_top)

    def wants(self, slot: int) -> bool:
        return slot in self._wanted

    def launch(self, row: Row, hidden: torch.Tensor) -> PendingPrompt:
        """Start the computation for the prompt tokens that follow the row's positions.

        Args:
            hidden: [row.num_tokens, hidden_size], of the row.
        """
        prompt_len, num_top = self._wanted[row.slot]
        first, end = row.start + 1, min(row.start + row.num_tokens + 1, prompt_len)
        parts = []
        for start in range(first, end, ROWS):
            stop = min(start + ROWS, end)
            logits = self._model.logits(hidden[start - first : stop - first])
            parts.append(gather_logprobs(logits, self._token_ids[row.slot, start:stop], [num_top] * (stop - start)))
        return PendingPrompt(parts)
