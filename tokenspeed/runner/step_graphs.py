"""Recorded decode steps: one graph a batch size, over static buffers. A CPU's tape and a CUDA graph look alike here.

A graph computes hidden states and head output for R decode rows, one token each. Its inputs are copied into the
buffers before each replay; lengths, pages and positions are read from them, so one graph serves every context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch
from tokenspeed.kernels.ops import GraphUnsupported, Recorder, StepGraph
from tokenspeed.models.interface import Model
from tokenspeed.runner.device_state import DeviceState, StepInputs, with_groups


@dataclass(slots=True)
class _Recorded:
    graph: StepGraph
    inputs: StepInputs
    head: torch.Tensor


class StepGraphs:
    """Graphs for 1..max_rows decode rows, recorded by `capture`."""

    def __init__(self, model: Model, backend: AttentionBackend, recorder: Recorder, state: DeviceState) -> None:
        self._model = model
        self._backend = backend
        self._recorder = recorder
        self._num_groups, _, self._max_pages = state.page_tables.shape
        self._scratch_token = state.scratch_page * state.page_size
        self._recorded: dict[int, _Recorded] = {}

    def capture(self, max_rows: int) -> str:
        """Record every size; returns a line for the log. Sizes that cannot be recorded run eagerly."""
        for num_rows in range(1, max_rows + 1):
            try:
                self._recorded[num_rows] = self._record(num_rows)
            except GraphUnsupported as reason:
                return f"step graphs: {len(self._recorded)} sizes, then eager ({reason})"
        return f"step graphs: recorded for 1 to {max_rows} decode rows"

    def covers(self, num_rows: int) -> bool:
        return num_rows in self._recorded

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Replay for decode rows; returns the head's output [R, vocab], valid until the next replay of this size."""
        recorded = self._recorded[inputs.batch.num_requests]
        static, batch = recorded.inputs, inputs.batch
        static.token_ids.copy_(inputs.token_ids)
        static.positions.copy_(inputs.positions)
        static.batch.seq_lens.copy_(batch.seq_lens)
        for index in range(self._num_groups):
            kept, group = static.batch.group(index), batch.group(index)
            kept.slots.copy_(group.slots)
            kept.page_table[:, : group.page_table.shape[1]] = group.page_table
        recorded.graph.replay()
        return recorded.head

    def _record(self, num_rows: int) -> _Recorded:
        inputs = self._static_inputs(num_rows)
        self._backend.plan(inputs.batch)
        with self._recorder.record() as graph:
            head = self._model.head(self._model.forward(inputs.token_ids, inputs.positions, inputs.batch))
        return _Recorded(graph, inputs, head)

    def _static_inputs(self, num_rows: int) -> StepInputs:
        query_start = torch.arange(num_rows + 1, dtype=torch.int32)
        seq_lens = torch.ones(num_rows, dtype=torch.int32)
        batches = [
            AttentionBatch(
                query_start=query_start,
                seq_lens=seq_lens,
                page_table=torch.zeros(num_rows, self._max_pages, dtype=torch.int32),
                slots=torch.full((num_rows,), self._scratch_token, dtype=torch.int64),
                num_requests=num_rows,
                num_tokens=num_rows,
            )
            for _ in range(self._num_groups)
        ]
        token_ids, positions = torch.zeros(2, num_rows, dtype=torch.int64)
        return StepInputs(token_ids, positions, with_groups(batches))
