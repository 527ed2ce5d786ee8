"""Which tokens a step's constrained rows may sample, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed.kernels.upload import send


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Bits of some rows of a batch.

    Fields:
        rows: which rows of the logits, ascending.
        words: [len(rows), ceil(V / 32)] int32 on the host; bit i % 32 of word i // 32 allows token i.
    """

    rows: list[int]
    words: NDArray[np.int32]

    def part(self, rows: slice) -> TokenMasks | None:
        """Of some rows of the batch, counted from the first of them; None where none of those is constrained."""
        mine = [place for place, row in enumerate(self.rows) if rows.start <= row < rows.stop]
        if not mine:
            return None
        return TokenMasks([self.rows[place] - rows.start for place in mine], self.words[mine])

    def apply(self, logits: Tensor) -> None:
        """Set what is not allowed to -inf in `logits` [N, V] float32, in place."""
        forbidden = self._forbidden(logits.shape[-1], logits.device)
        for place, row in enumerate(self.rows):
            logits[row].masked_fill_(forbidden[place], -torch.inf)

    def _forbidden(self, vocab_size: int, device: torch.device) -> Tensor:
        """[len(rows), V] bool. A GPU takes the bits apart itself: 32 times less to copy, and nobody waits."""
        if device.type == "cpu":
            bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
            return torch.from_numpy(bits == 0)
        words = send(torch.from_numpy(self.words), device)
        places = torch.arange(32, dtype=torch.int32, device=device)
        return (((words[:, :, None] >> places) & 1) == 0).flatten(1)[:, :vocab_size]
