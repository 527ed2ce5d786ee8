"""Small prompt steps as CUDA graphs: inputs from slots, model, head of each request's last token, sampling.

A step of 20 to 500 prompt tokens keeps the GPU busy for a few milliseconds and, launched kernel by kernel, the host
for longer. One graph a token count of a short ladder, each with room for a few requests. A replay needs four numbers a
request:

    rows   [slot | start | end | target]       end: where its tokens end among the T; target: the slot it samples into

Padding tokens belong to the scratch slot and write into the scratch page; padding requests have no tokens. A request
that samples nothing (a chunk inside its prompt) has the scratch slot as its target, so that its token is kept nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch
from tokenspeed.kernels.ops import Recorder, StepGraph
from tokenspeed.kernels.triton.sampling import SlotSampling, sample_rows
from tokenspeed.kernels.triton.step_inputs import PrefillInputs, prefill_inputs
from tokenspeed.models.interface import Model
from tokenspeed.protocol.step import Row
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.memory import PREFILL_GRAPH_REQUESTS


@dataclass(slots=True)
class PrefillGraph:
    """One recorded token count.

    Fields:
        rows: its input, [4, R] int32.
        inputs, batch: buffers between its kernels; they live as long as the graph writes to them.
        logits: [R, V], in the head's dtype. token_ids: [R] int32. Its output, valid until the next replay of any graph.
    """

    graph: StepGraph
    rows: torch.Tensor
    inputs: PrefillInputs
    batch: AttentionBatch
    logits: torch.Tensor
    token_ids: torch.Tensor


class PrefillGraphs:
    """Graphs for the token counts of a ladder, recorded by `capture`.

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
        self._scratch_slot = scratch_slot
        self._max_num_seqs = state.token_ids.shape[0] - 1
        self._graphs: dict[int, PrefillGraph] = {}
        self._ladder: list[int] = []

    def capture(self, sizes: Sequence[int]) -> None:
        """Record every token count, the largest first, so that the shared memory pool is laid out once."""
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._record(size)
        self._ladder = sorted(self._graphs)

    def size_for(self, rows: Sequence[Row]) -> int | None:
        """The recorded token count that serves these rows; None when none does.

        Decode rows are not served: over a long context one program would read all of it.
        """
        num_tokens = sum(row.num_tokens for row in rows)
        if any(row.is_decode for row in rows):
            return None
        size = next((size for size in self._ladder if size >= num_tokens), None)
        return None if size is None or len(rows) > num_requests(size, self._max_num_seqs) else size

    def graph(self, size: int) -> PrefillGraph:
        """The graph of a recorded token count."""
        return self._graphs[size]

    def fill(self, host: torch.Tensor, rows: Sequence[Row]) -> None:
        """Write a graph's input, [4, R] int32 on the host, for rows that a graph of R requests serves."""
        end = 0
        columns = []
        for row in rows:
            end += row.num_tokens
            columns.append((row.slot, row.start, end, row.slot if row.samples else self._scratch_slot))
        padding = [(self._scratch_slot, 0, end, self._scratch_slot)] * (host.shape[1] - len(columns))
        host.numpy()[:] = list(zip(*columns, *padding, strict=True))

    def _record(self, size: int) -> PrefillGraph:
        rows = torch.zeros(4, num_requests(size, self._max_num_seqs), dtype=torch.int32, device=self._state.device)
        rows[0] = rows[3] = self._scratch_slot
        inputs, batch = self._buffers(size, rows.shape[1])
        self._forward(rows, inputs, batch)  # compiles and loads kernels, allocates workspaces
        with self._recorder.record() as graph:
            logits, token_ids = self._forward(rows, inputs, batch)
        return PrefillGraph(graph, rows, inputs, batch, logits, token_ids)

    def _forward(
        self, rows: torch.Tensor, inputs: PrefillInputs, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        prefill_inputs(rows, state.token_ids, state.page_table, state.page_size, self._scratch_slot, inputs)
        self._backend.plan(batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, batch, inputs.wanted)
        logits = self._model.head(hidden)
        positions = inputs.next_positions
        return logits, sample_rows(logits, rows[3], positions, self._sampling, state.token_ids, self._pdl)

    def _buffers(self, size: int, requests: int) -> tuple[PrefillInputs, AttentionBatch]:
        device = self._state.device

        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        inputs = PrefillInputs(
            token_ids=zeros(size, torch.int64),
            positions=zeros(size, torch.int64),
            flat_slots=zeros(size, torch.int64),
            query_start=zeros(requests + 1, torch.int32),
            seq_lens=zeros(requests, torch.int32),
            page_table=torch.zeros(requests, self._state.page_table.shape[1], dtype=torch.int32, device=device),
            wanted=zeros(requests, torch.int64),
            next_positions=zeros(requests, torch.int64),
        )
        batch = AttentionBatch(
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            page_table=inputs.page_table,
            slots=inputs.flat_slots,
            num_requests=requests,
            num_tokens=size,
        )
        return inputs, batch


def num_requests(size: int, max_num_seqs: int) -> int:
    """Requests that a graph of `size` tokens has room for: fewer than tokens, or the step would pass for a decode."""
    return min(PREFILL_GRAPH_REQUESTS, max_num_seqs, size - 1)
