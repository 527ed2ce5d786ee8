"""Whole decode steps as CUDA graphs, one a batch size of the ladder: see `slot_graphs`.

A replay needs two numbers a row, and the pages that rows bring, which the graph itself notes in the page tables:

    rows   [slot | start | page of group 0 | ...]       start: the position of the row's one token; page: -1 = none
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.kernels.slot_ops import RecordedInputs
from tokenspeed.protocol.step import Row, SteadyRows, SteadySet
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.slot_graphs import SlotGraphs

NO_PAGE = -1


class SteadyInput:
    """A graph's input for steps of one steady set; who has it writes only what changes, and nobody else writes there
    meanwhile.

    Args:
        host: [2 + G, size] int32.
    """

    def __init__(self, host: NDArray[np.int32], members: SteadySet, scratch_slot: int, state: DeviceState) -> None:
        count = len(members.slots)
        host[0, :count] = members.slots
        host[0, count:] = scratch_slot
        host[1, count:] = 0
        host[2:] = NO_PAGE
        self._state = state
        self._first_starts = np.array(members.starts, dtype=np.int32)
        self._starts, self._pages = host[1, :count], host[2:]
        self._has_pages = False

    def fill(self, rows: SteadyRows) -> None:
        """For these rows of the set."""
        np.add(self._first_starts, rows.age, out=self._starts)
        if self._has_pages:
            self._pages.fill(NO_PAGE)
        self._has_pages = bool(rows.new_pages)
        for place, new_pages in rows.new_pages.items():
            self._pages[:, place] = [pages[0] if pages else NO_PAGE for pages in new_pages]
            self._state.note_pages(rows.members.slots[place], new_pages)


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

    def fill(self, host: NDArray[np.int32], rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Write a graph's input, [2 + G, size] int32 on the host, for rows that it serves."""
        count = len(rows)
        host[0, :count] = slots
        host[1, :count] = [row.start for row in rows]
        host[0, count:] = self.scratch_slot
        host[1, count:] = 0
        host[2:] = NO_PAGE
        for index in self._state.bringing(rows):
            row = rows[index]
            host[2:, index] = [pages[0] if pages else NO_PAGE for pages in row.new_pages]
            self._state.note_pages(row.slot, row.new_pages)

    def steady_input(self, host: NDArray[np.int32], members: SteadySet) -> SteadyInput:
        """Write what the steps of a steady set have in common into a graph's input, [2 + G, size] int32 on the host."""
        return SteadyInput(host, members, self.scratch_slot, self._state)

    def _padding_rows(self, size: int) -> torch.Tensor:
        num_groups = self._state.page_tables.shape[0]
        rows = torch.full((2 + num_groups, size), NO_PAGE, dtype=torch.int32, device=self._state.device)
        rows[0], rows[1] = self.scratch_slot, 0
        return rows

    def _buffers(self, size: int) -> RecordedInputs:
        return self._inputs(size, size, has_wanted=False)

    def _fill_inputs(self, rows: torch.Tensor, inputs: RecordedInputs) -> None:
        self._ops.decode_inputs(rows, self._tables, inputs)

    def _targets(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[0]
