"""Whole decode steps as CUDA graphs: inputs from slots, model, head, sampling, sampled tokens back into the slots.

One graph a batch size of the ladder. A replay needs two numbers a row (slot and position), so a steady step costs the
host one small copy and one launch. Rows beyond the step's own point at a scratch slot whose page nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch
from tokenspeed.kernels.ops import Recorder, StepGraph
from tokenspeed.kernels.triton.sampling import SlotSampling, sample_rows
from tokenspeed.kernels.triton.step_inputs import DecodeInputs, decode_inputs
from tokenspeed.models.interface import Model
from tokenspeed.runner.device_state import DeviceState


@dataclass(slots=True)
class DecodeGraph:
    """One recorded size.

    Fields:
        rows: its input, [2, R] int32.
        inputs, batch: buffers between its kernels. The graph writes to their addresses at every replay, so they must
            live as long as it does.
        logits: [R, V], in the head's dtype. token_ids: [R] int32. Its output, valid until the next replay of any size.
    """

    graph: StepGraph
    rows: torch.Tensor
    inputs: DecodeInputs
    batch: AttentionBatch
    logits: torch.Tensor
    token_ids: torch.Tensor


class DecodeGraphs:
    """Graphs for the sizes of a ladder, recorded by `capture`.

    Args:
        scratch_slot: a slot of `state` that no request has; its page table points at the scratch page.
        pdl: programmatic dependent launch (compute capability 9.0 and later).
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        recorder: Recorder,
        state: DeviceState,
        sampling: SlotSampling,
        scratch_slot: int,
        pdl: bool,
    ) -> None:
        self._model = model
        self._backend = backend
        self._recorder = recorder
        self._state = state
        self._sampling = sampling
        self._pdl = pdl
        self.scratch_slot = scratch_slot
        self._graphs: dict[int, DecodeGraph] = {}
        self._size_for: dict[int, int] = {}

    def capture(self, sizes: Sequence[int], pad: bool) -> None:
        """Record every size, the largest first, so that the shared memory pool is laid out once.

        Args:
            pad: a batch between two sizes is served by the larger one.
        """
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._record(size)
        ladder = sorted(self._graphs)
        for num_rows in range(1, max(ladder) + 1):
            size = next(size for size in ladder if size >= num_rows)
            if pad or size == num_rows:
                self._size_for[num_rows] = size

    def size_for(self, num_rows: int) -> int | None:
        """The recorded size that serves `num_rows`; None when there is none."""
        return self._size_for.get(num_rows)

    def graph(self, size: int) -> DecodeGraph:
        """The graph of a recorded size."""
        return self._graphs[size]

    def _record(self, size: int) -> DecodeGraph:
        rows = torch.empty(2, size, dtype=torch.int32, device=self._state.device)
        rows[0] = self.scratch_slot
        rows[1] = 0
        inputs, batch = self._buffers(size)
        self._forward(rows, inputs, batch)  # compiles and loads kernels, allocates workspaces
        with self._recorder.record() as graph:
            logits, token_ids = self._forward(rows, inputs, batch)
        return DecodeGraph(graph, rows, inputs, batch, logits, token_ids)

    def _forward(
        self, rows: torch.Tensor, inputs: DecodeInputs, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        decode_inputs(rows, state.token_ids, state.page_table, state.page_size, inputs)
        self._backend.plan(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, batch)
        logits = self._model.head(hidden)
        positions = inputs.next_positions
        return logits, sample_rows(logits, rows[0], positions, self._sampling, state.token_ids, self._pdl)

    def _buffers(self, size: int) -> tuple[DecodeInputs, AttentionBatch]:
        device = self._state.device

        def longs() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        page_table = torch.zeros(size, self._state.page_table.shape[1], dtype=torch.int32, device=device)
        inputs = DecodeInputs(
            token_ids=longs(),
            positions=longs(),
            next_positions=longs(),
            seq_lens=torch.ones(size, dtype=torch.int32, device=device),
            flat_slots=longs(),
            page_table=page_table,
        )
        batch = AttentionBatch(
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=inputs.seq_lens,
            page_table=page_table,
            slots=inputs.flat_slots,
            num_requests=size,
            num_tokens=size,
        )
        return inputs, batch
