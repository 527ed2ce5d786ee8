"""StepPlan -> device state -> forward (recorded or eager) -> sample -> StepResult, on one thread of its own.

May be added here: another kind of row, another graph. Not here: any decision about who runs (scheduler/), any rule
about one model or one device (models/, kernels/).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionBackend
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.kernels.ops import Ops
from tokenspeed.models.interface import Model
from tokenspeed.protocol.step import Row, RowResult, StepPlan, StepResult, TokenLogprobs
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.step_graphs import StepGraphs
from tokenspeed.sampling.logprobs import token_logprobs
from tokenspeed.sampling.sampler import Sampler

MAX_GRAPH_ROWS = 32  # above this a dense bf16 matmul beats the quantized kernels, and dispatch no longer counts


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that fix the runner's buffers: slots, tokens a sequence."""

    max_num_seqs: int
    max_model_len: int


class ModelRunner:
    """Executes plans in order. See `runner.interface.Runner` for the face."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        ops: Ops,
        groups: list[GroupSpec],
        limits: Limits,
        vocab_size: int,
        enforce_eager: bool,
        report: list[str],
    ) -> None:
        self._model = model
        self._backend = backend
        self._groups = groups
        self._limits = limits
        self._report = report
        page_size = groups[0].page_size
        scratch_page = groups[0].num_pages
        self._state = DeviceState(limits.max_num_seqs, limits.max_model_len, page_size, scratch_page, ops.device)
        self._sampler = Sampler(limits.max_num_seqs, vocab_size, ops.device)
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # slot -> (prompt_len, how many alternatives)
        self._graphs: StepGraphs | None = None
        if ops.recorder is not None and not enforce_eager:
            max_pages = self._state.page_table.shape[1]
            self._graphs = StepGraphs(model, backend, ops.recorder, max_pages, scratch_page * page_size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")

    @property
    def groups(self) -> list[GroupSpec]:
        return self._groups

    @property
    def report(self) -> list[str]:
        return self._report

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._step, plan)

    def capture(self) -> None:
        def warm() -> None:
            if self._graphs is None:
                self._report.append("step graphs: none, every step runs eagerly")
            else:
                self._report.append(self._graphs.capture(min(MAX_GRAPH_ROWS, self._limits.max_num_seqs)))

        self._on_thread(warm)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _on_thread(self, work: Callable[[], None]) -> None:
        self._thread.submit(work).result()

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._state.admit(admission)
            self._sampler.admit(admission)
            wanted = admission.sampling.prompt_logprobs
            if wanted is None:
                self._prompt_logprobs.pop(admission.slot, None)
            else:
                self._prompt_logprobs[admission.slot] = (admission.prompt_len, wanted)
        self._state.grow(plan.rows)

        num_decodes = sum(row.is_decode for row in plan.rows)
        decodes, others = plan.rows[:num_decodes], plan.rows[num_decodes:]
        if self._graphs is not None and self._graphs.covers(num_decodes):
            # Decode rows keep one set of kernels whatever else the step holds, so a sequence's text does not depend
            # on who else is being prefilled.
            logits = [self._graphs.run(self._state.gather(decodes)).float()]
        else:
            others, logits = plan.rows, []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if others:
            logits.append(self._eager(others, prompt_logprobs))
        return StepResult(plan.step_id, self._sample(plan.rows, torch.cat(logits), prompt_logprobs))

    def _eager(self, rows: list[Row], prompt_logprobs: dict[int, list[TokenLogprobs]]) -> torch.Tensor:
        """Forward of any rows; logits of those that sample, in row order. Fills prompt logprobs by slot."""
        inputs = self._state.gather(rows)
        self._backend.plan(inputs.batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        last, end = [], 0
        for row in rows:
            if row.slot in self._prompt_logprobs:
                prompt_logprobs[row.slot] = self._prompt_row(row, hidden[end : end + row.num_tokens])
            end += row.num_tokens
            if row.samples:
                last.append(end - 1)
        return self._model.logits(hidden[torch.tensor(last, dtype=torch.int64, device=hidden.device)])

    def _prompt_row(self, row: Row, hidden: torch.Tensor) -> list[TokenLogprobs]:
        """Logprobs of the prompt tokens that follow this row's positions."""
        prompt_len, num_top = self._prompt_logprobs[row.slot]
        first, end = row.start + 1, min(row.start + row.num_tokens + 1, prompt_len)
        found: list[TokenLogprobs] = []
        for start in range(first, end, _PROMPT_LOGPROB_ROWS):
            stop = min(start + _PROMPT_LOGPROB_ROWS, end)
            logits = self._model.logits(hidden[start - first : stop - first])
            targets = self._state.token_ids[row.slot, start:stop]
            found += token_logprobs(logits, targets, [num_top] * (stop - start))
        return found

    def _sample(
        self, rows: list[Row], logits: torch.Tensor, prompt_logprobs: dict[int, list[TokenLogprobs]]
    ) -> list[RowResult]:
        sampling = [row for row in rows if row.samples]
        results: dict[int, RowResult] = {}
        if sampling:
            slots = [row.slot for row in sampling]
            positions = [row.start + row.num_tokens for row in sampling]
            sampled = self._sampler.sample(logits, slots, positions)
            where = torch.tensor([slots, positions], dtype=torch.int64, device=logits.device)
            self._state.append_sampled(where[0], where[1], sampled.token_ids)
            for row, outcome in zip(sampling, sampled.finish(), strict=True):
                results[row.slot] = RowResult(
                    slot=row.slot,
                    token_ids=[] if outcome.error else [outcome.token_id],
                    logprobs=[outcome.logprobs] if outcome.logprobs else [],
                    prompt_logprobs=prompt_logprobs.get(row.slot, []),
                    error=outcome.error,
                )
        return [
            results.get(row.slot) or RowResult(row.slot, [], prompt_logprobs=prompt_logprobs.get(row.slot, []))
            for row in rows
        ]


_PROMPT_LOGPROB_ROWS = 256  # rows of [rows, vocab] float32 logits alive at once: 50 MB at a vocabulary of 49k
