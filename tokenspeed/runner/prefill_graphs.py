"""Small prompt steps as CUDA graphs: `slot_graphs`, with the head for each request's last token.

A step of 20 to 1000 prompt tokens keeps the GPU busy for a few milliseconds and, launched kernel by kernel, the host
for as long or longer. One graph a token count of a short ladder, each with room for a few requests. A replay needs four
numbers a request:

    rows   [slot | start | end | target]       end: where its tokens end among the T; target: the slot it samples into

Padding tokens belong to the scratch slot and write into the scratch page; padding requests have no tokens. A request
that samples nothing (a chunk inside its prompt) has the scratch slot as its target, so that its token is kept nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.kernels.slot_ops import RecordedInputs
from tokenspeed.protocol.step import Row
from tokenspeed.runner.memory import PREFILL_GRAPH_REQUESTS
from tokenspeed.runner.slot_graphs import SlotGraphs


class PrefillGraphs(SlotGraphs):
    """Graphs for the token counts of a ladder, recorded by `capture`."""

    _ladder: Sequence[int] = ()

    def capture(self, sizes: Sequence[int]) -> None:
        """Record every token count."""
        self._ladder = self._record_all(sizes)

    def size_for(self, rows: Sequence[Row]) -> int | None:
        """The recorded token count that serves these rows; None when none does.

        Decode rows are not served: over a long context one program would read all of it.
        """
        num_tokens = sum(row.num_tokens for row in rows)
        if any(row.is_decode for row in rows):
            return None
        size = next((size for size in self._ladder if size >= num_tokens), None)
        return None if size is None or len(rows) > self._num_requests(size) else size

    def fill(self, host: torch.Tensor, rows: Sequence[Row]) -> None:
        """Write a graph's input, [4, R] int32 on the host, for rows that a graph of R requests serves."""
        end = 0
        columns = []
        for row in rows:
            end += row.num_tokens
            columns.append((row.slot, row.start, end, row.slot if row.samples else self.scratch_slot))
        padding = [(self.scratch_slot, 0, end, self.scratch_slot)] * (host.shape[1] - len(columns))
        host.numpy()[:] = list(zip(*columns, *padding, strict=True))

    def _num_requests(self, size: int) -> int:
        return num_requests(size, self._state.token_ids.shape[0] - 1)

    def _padding_rows(self, size: int) -> torch.Tensor:
        rows = torch.zeros(4, self._num_requests(size), dtype=torch.int32, device=self._state.device)
        rows[0] = rows[3] = self.scratch_slot
        return rows

    def _buffers(self, size: int) -> RecordedInputs:
        return self._inputs(size, self._num_requests(size), has_wanted=True)

    def _fill_inputs(self, rows: torch.Tensor, inputs: RecordedInputs) -> None:
        self._ops.prefill_inputs(rows, self._tables, self.scratch_slot, inputs)

    def _targets(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[3]


def num_requests(size: int, max_num_seqs: int) -> int:
    """Requests that a graph of `size` tokens has room for: fewer than tokens, or the step would pass for a decode."""
    return min(PREFILL_GRAPH_REQUESTS, max_num_seqs, size - 1)
