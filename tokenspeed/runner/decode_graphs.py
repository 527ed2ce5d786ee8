"""Whole decode steps as CUDA graphs, one a batch size of the ladder: see `slot_graphs`.

A replay needs two numbers a row:

    rows   [slot | start]       start: the position of the row's one token
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from tokenspeed.kernels.triton.step_inputs import RecordedInputs, decode_inputs
from tokenspeed.runner.slot_graphs import SlotGraphs, input_buffers


class DecodeGraphs(SlotGraphs):
    """Graphs for the batch sizes of a ladder, recorded by `capture`."""

    _ladder: Sequence[int] = ()
    _pad = True

    def capture(self, sizes: Sequence[int], pad: bool) -> None:
        """Record every size.

        Args:
            pad: a batch between two sizes is served by the larger one.
        """
        self._ladder, self._pad = self._record_all(sizes), pad

    def size_for(self, num_rows: int) -> int | None:
        """The recorded size that serves `num_rows`; None when there is none."""
        index = bisect_left(self._ladder, num_rows)
        if num_rows == 0 or index == len(self._ladder):
            return None
        size = self._ladder[index]
        return size if self._pad or size == num_rows else None

    def _padding_rows(self, size: int) -> torch.Tensor:
        rows = torch.zeros(2, size, dtype=torch.int32, device=self._state.device)
        rows[0] = self.scratch_slot
        return rows

    def _buffers(self, size: int) -> RecordedInputs:
        return input_buffers(self._state, size, size, has_wanted=False)

    def _fill_inputs(self, rows: torch.Tensor, inputs: RecordedInputs) -> None:
        decode_inputs(rows, self._tables, inputs)

    def _targets(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[0]
