"""Whole steps as CUDA graphs over slots: inputs from slots, model, head, sampling, sampled tokens back into the slots.

What a graph of decodes and one of prompts have in common: static buffers, recording, one graph a size of a ladder. A
replay needs a few numbers a row, so it costs the host one small copy and one launch. Rows beyond the step's own point
at a scratch slot whose pages nobody reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch
from tokenspeed.kernels.ops import Recorder, StepGraph
from tokenspeed.kernels.slot_ops import RecordedInputs, SlotOps, SlotSampling, SlotTables
from tokenspeed.models.interface import Model
from tokenspeed.runner.device_state import DeviceState, with_groups


@dataclass(slots=True)
class SlotGraph:
    """One recorded size.

    Fields:
        rows: its input, [numbers a row, R] int32.
        inputs, batch: buffers between its kernels. The graph writes to their addresses at every replay, so they must
            live as long as it does.
        logits: [R, V], in the head's dtype. token_ids: [R] int32. Its output, valid until the next replay of any graph.
    """

    graph: StepGraph
    rows: torch.Tensor
    inputs: RecordedInputs
    batch: AttentionBatch
    logits: torch.Tensor
    token_ids: torch.Tensor


class SlotGraphs(ABC):
    """Graphs for the sizes of a ladder.

    Args:
        scratch_slot: a slot of `state` that no request has; its page tables point at the scratch page.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        ops: SlotOps,
        recorder: Recorder,
        state: DeviceState,
        sampling: SlotSampling,
        scratch_slot: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._ops = ops
        self._recorder = recorder
        self._state = state
        self._tables = SlotTables(state.token_ids, state.page_tables, state.windows, state.page_size)
        self._sampling = sampling
        self.scratch_slot = scratch_slot
        self._graphs: dict[int, SlotGraph] = {}

    def graph(self, size: int) -> SlotGraph:
        """The graph of a recorded size."""
        return self._graphs[size]

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of the recorded graphs' output."""
        return next(iter(self._graphs.values())).logits.dtype

    def _record_all(self, sizes: Sequence[int]) -> list[int]:
        """Record every size, the largest first, so that the shared memory pool is laid out once; the ladder, rising."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._record(size)
        return sorted(self._graphs)

    def _record(self, size: int) -> SlotGraph:
        rows, inputs = self._padding_rows(size), self._buffers(size)
        batch = recorded_batch(inputs)
        self._forward(rows, inputs, batch)  # compiles and loads kernels, allocates workspaces
        with self._recorder.record() as graph:
            logits, token_ids = self._forward(rows, inputs, batch)
        return SlotGraph(graph, rows, inputs, batch, logits, token_ids)

    def _forward(
        self, rows: torch.Tensor, inputs: RecordedInputs, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._fill_inputs(rows, inputs)
        self._backend.plan(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, batch, inputs.wanted)
        logits = self._model.head(hidden)
        slots, positions = self._targets(rows), inputs.next_positions
        return logits, self._ops.sample_rows(logits, slots, positions, self._sampling, self._state.token_ids)

    @abstractmethod
    def _padding_rows(self, size: int) -> torch.Tensor:
        """The graph's input, for rows that are all padding."""

    def _inputs(self, num_tokens: int, num_requests: int, has_wanted: bool) -> RecordedInputs:
        num_groups, _, max_pages = self._state.page_tables.shape
        return input_buffers(num_groups, max_pages, num_tokens, num_requests, has_wanted, self._state.device)

    @abstractmethod
    def _buffers(self, size: int) -> RecordedInputs:
        """What the first kernel fills."""

    @abstractmethod
    def _fill_inputs(self, rows: torch.Tensor, inputs: RecordedInputs) -> None:
        """The first kernel."""

    @abstractmethod
    def _targets(self, rows: torch.Tensor) -> torch.Tensor:
        """[R] int32: slots that the rows sample into."""


def input_buffers(
    num_groups: int, max_pages: int, num_tokens: int, num_requests: int, has_wanted: bool, device: torch.device
) -> RecordedInputs:
    """Buffers for so many tokens and requests; `query_start` counts up by one, as a decode step needs it."""

    def longs(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return RecordedInputs(
        token_ids=longs(num_tokens),
        positions=longs(num_tokens),
        flat_slots=longs(num_groups, num_tokens),
        query_start=torch.arange(num_requests + 1, dtype=torch.int32, device=device),
        seq_lens=ints(num_requests),
        page_tables=ints(num_groups, num_requests, max_pages),
        wanted=longs(num_requests) if has_wanted else None,
        next_positions=longs(num_requests),
    )


def input_bytes(num_groups: int, max_pages: int, num_tokens: int, num_requests: int, has_wanted: bool) -> int:
    """What these buffers take; of each, up to 511 more as the allocator rounds."""
    made = input_buffers(num_groups, max_pages, num_tokens, num_requests, has_wanted, torch.device("meta"))
    parts = (getattr(made, part.name) for part in fields(made))
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def recorded_batch(inputs: RecordedInputs) -> AttentionBatch:
    """The batch over these buffers. Lengths are known to the device only."""
    batches = (
        AttentionBatch(
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            page_table=page_table,
            slots=slots,
            num_requests=len(inputs.seq_lens),
            num_tokens=len(inputs.token_ids),
        )
        for page_table, slots in zip(inputs.page_tables, inputs.flat_slots, strict=True)
    )
    return with_groups(list(batches))
