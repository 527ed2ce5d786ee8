"""StepPlan -> device state -> forward (recorded or eager) -> sample -> StepResult, on one thread of its own.

May be added here: another kind of row, another graph. Not here: any decision about who runs (scheduler/), any rule
about one model or one device (models/, kernels/).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.ops import Ops
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, RowResult, StepPlan, StepResult, TokenLogprobs, results_of
from tokenspeed.runner.constraints import Constraints, Fault
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.profiler import StepProfiler
from tokenspeed.runner.prompt_logprobs import PromptLogprobs
from tokenspeed.runner.step_graphs import StepGraphs
from tokenspeed.sampling.masks import TokenMasks
from tokenspeed.sampling.sampler import Sampler

MAX_GRAPH_ROWS = 32
"""Decode rows that a graph is recorded for, where the kernels allow that many."""

PROMPT_ROWS = (80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""A step's prompt rows are filled up to one of these in bfloat16, above to a multiple of 128. For two reasons. Kernels
for few rows serve at most 64: the same seed gives the same text whatever the batch only if prompts always go through
those for many. And oneDNN, torch's matmul in bfloat16, makes and keeps a program for every number of rows it meets: 300
numbers took 870 MB (the four linears of a 135M model's layer)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that fix the runner's buffers: slots, tokens a sequence, logits a row."""

    max_num_seqs: int
    max_model_len: int
    vocab_size: int


class ModelRunner:
    """Executes plans in order. See `runner.interface.Runner` for the face.

    Args:
        loaded: the model over the pages of `groups`, its kernels and its report, which the runner continues.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: list[GroupSpec],
        limits: Limits,
        enforce_eager: bool,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        model, backend, ops = loaded.model, loaded.backend, loaded.ops
        self._model = model
        self._backend = backend
        self.groups = groups
        self._limits = limits
        self.report = loaded.report
        self.grammars = grammars
        self._constraints = Constraints(grammars, limits.vocab_size)
        # The slot after the last is scratch: rows that fill a step up. Its page tables name the scratch page.
        self._scratch_slot = limits.max_num_seqs
        num_slots = limits.max_num_seqs + 1
        self._state = DeviceState(num_slots, limits.max_model_len, groups, ops.device)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size, ops.device)
        self._prompts = PromptLogprobs(model, self._state.token_ids)
        self._graphs: StepGraphs | None = None
        self._splits_steps = ops.recorder is not None
        self._fills_up = ops.dtype == torch.bfloat16
        self._decode_rows = _decode_rows(ops)
        if ops.recorder is not None and not enforce_eager:
            self._graphs = StepGraphs(model, backend, ops.recorder, self._state)
        # An eager forward has all of torch's threads. What stands around it is small, and a second thread there costs
        # more than it saves: its core is the native workers' or the server's (2 cores, 8 sampled rows: 15.7 ms a step
        # with two, 14.9 ms with one; on a busy machine a copy of the logits took 5 ms instead of 0.1).
        self._num_threads = torch.get_num_threads()
        self._profiler = StepProfiler(has_gpu=False)
        self._thread = ThreadPoolExecutor(1, "runner", initializer=torch.set_num_threads, initargs=(1,))

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._profiled_step, plan)

    def start_profile(self, options: ProfileOptions) -> Future[str]:
        return self._thread.submit(self._profiler.start, options)

    def stop_profile(self) -> Future[str]:
        return self._thread.submit(self._profiler.stop)

    def capture(self) -> None:
        with startup_phase("graph.capture"):
            self.report.append(self._thread.submit(self._record).result())
        with startup_phase("kernels.warm_up"):
            self._thread.submit(self._warm_up).result()

    def close(self) -> None:
        self._thread.submit(self._profiler.close)
        self._thread.shutdown(wait=True)
        if self.grammars is not None:
            self.grammars.close()

    def _record(self) -> str:
        """Record the graphs. Returns a line for the log."""
        if self._graphs is None:
            return "step graphs: none, every step runs eagerly"
        return self._graphs.capture(min(MAX_GRAPH_ROWS, self._limits.max_num_seqs, self._decode_rows))

    def _warm_up(self) -> None:
        """Run a prompt and a decode on the scratch page, so that no request pays for the first use of a kernel."""
        num_tokens = min(_WARM_UP_TOKENS, self._limits.max_model_len - 1)
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        # An admission without pages: all page tables of a fresh slot name the scratch page.
        no_pages: tuple[list[int], ...] = ([],) * len(self.groups)
        admission = Admission(0, "warm-up", 0, [0] * num_tokens, num_tokens, no_pages, sampling)
        self._step(StepPlan(-2, [admission], [Row(0, 0, num_tokens, no_pages, True, False)], num_tokens))
        self._step(StepPlan(-1, [], [Row(0, num_tokens, 1, no_pages, True, True)], 1))

    def _profiled_step(self, plan: StepPlan) -> StepResult:
        with self._profiler.step(plan.step_id):
            return self._step(plan)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._state.admit(admission)
            self._sampler.admit(admission)
            self._constraints.admit(admission)
            self._prompts.admit(admission)
        planned = list(plan.rows)
        self._state.grow(planned)

        num_decodes = sum(row.is_decode for row in planned)
        decodes, others = planned[:num_decodes], planned[num_decodes:]
        # Where few rows have kernels of their own (which is where steps are recorded), decode rows keep to them
        # whatever else the step holds, so that a sequence's text does not depend on who else is in it.
        if not self._splits_steps:
            decodes, others = [], planned
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        logits: list[torch.Tensor] = []
        for first in range(0, len(decodes), self._decode_rows):
            rows = decodes[first : first + self._decode_rows]
            if self._graphs is not None and self._graphs.covers(len(rows)):
                logits.append(self._graphs.run(self._state.gather(rows)).float())
            else:
                logits.append(self._eager(rows, prompt_logprobs))
        if others:
            logits.append(self._eager(self._filled_up(others), prompt_logprobs))
        together = logits[0] if len(logits) == 1 else torch.cat(logits)  # a cat of one would copy it
        return StepResult(plan.step_id, results_of(plan.rows, self._sample(planned, together, prompt_logprobs)))

    def _eager(self, rows: list[Row], prompt_logprobs: dict[int, list[TokenLogprobs]]) -> torch.Tensor:
        """Forward of any rows; logits of those that sample, in row order. Fills prompt logprobs by slot."""
        torch.set_num_threads(self._num_threads)
        try:
            return self._forward(rows, prompt_logprobs)
        finally:
            torch.set_num_threads(1)

    def _filled_up(self, rows: list[Row]) -> list[Row]:
        """Rows of a step with prompts, with scratch tokens behind them: see `PROMPT_ROWS`."""
        if not self._fills_up or all(row.is_decode for row in rows):
            return rows
        num_tokens = sum(row.num_tokens for row in rows)
        missing = prompt_rows(num_tokens) - num_tokens
        longest = self._limits.max_model_len
        lengths = [longest] * (missing // longest) + [missing % longest]
        return rows + [Row(self._scratch_slot, 0, length, ([],), False, False) for length in lengths if length]

    def _forward(self, rows: list[Row], prompt_logprobs: dict[int, list[TokenLogprobs]]) -> torch.Tensor:
        inputs = self._state.gather(rows)
        self._backend.plan(inputs.batch)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        last, end = [], 0
        for row in rows:
            end += row.num_tokens
            if row.samples:
                last.append(end - 1)
        for row, hidden_row in self._asking(rows, hidden):
            prompt_logprobs[row.slot] = self._prompts.launch(row, hidden_row).finish()
        wanted = hidden[torch.tensor(last, dtype=torch.int64, device=hidden.device)]
        turns = torch.split(wanted, self._decode_rows)  # the head, too, keeps to its kernels for few rows
        return torch.cat([self._model.logits(turn) for turn in turns])

    def _asking(self, rows: list[Row], hidden: torch.Tensor) -> Iterator[tuple[Row, torch.Tensor]]:
        """The rows that want logprobs of their prompt, with their part of `hidden`."""
        end = 0
        for row in rows:
            if self._prompts.wants(row.slot):
                yield row, hidden[end : end + row.num_tokens]
            end += row.num_tokens

    def _sample(
        self, rows: list[Row], logits: torch.Tensor, prompt_logprobs: dict[int, list[TokenLogprobs]]
    ) -> list[RowResult]:
        sampling = [row for row in rows if row.samples]
        results: dict[int, RowResult] = {}
        if sampling:
            slots = [row.slot for row in sampling]
            positions = [row.start + row.num_tokens for row in sampling]
            constrained = self._constraints.rows(slots)
            masks = TokenMasks(constrained, self._constraints.fill(slots, constrained)) if constrained else None
            sampled = self._sampler.sample(logits, slots, positions, masks)
            where = torch.tensor([slots, positions], dtype=torch.int64, device=logits.device)
            self._state.append_sampled(where[0], where[1], sampled.token_ids)
            for row, outcome in zip(sampling, sampled.finish(), strict=True):
                fault = Fault(outcome.error) if outcome.error else None
                fault = fault or self._constraints.accept(row.slot, outcome.token_id)
                results[row.slot] = RowResult(
                    slot=row.slot,
                    token_ids=[] if fault else [outcome.token_id],
                    logprobs=[outcome.logprobs] if outcome.logprobs and not fault else [],
                    prompt_logprobs=prompt_logprobs.get(row.slot, []),
                    error=fault.error if fault else None,
                    error_code=fault.code if fault else None,
                )
        return [
            results.get(row.slot) or RowResult(row.slot, [], prompt_logprobs=prompt_logprobs.get(row.slot, []))
            for row in rows
        ]


def prompt_rows(num_tokens: int) -> int:
    """The number of rows that so many prompt tokens are filled up to."""
    return next((rows for rows in PROMPT_ROWS if rows >= num_tokens), -(-num_tokens // 128) * 128)


def _decode_rows(ops: Ops) -> int:
    """Decode rows of one forward. Quantized kernels serve so many, and more rows are served in turns: a dense matmul of
    more would be no quicker up to about three turns, and would change their text."""
    return ops.block_linear.max_rows if ops.recorder is not None and ops.block_linear is not None else _ANY_NUMBER


_WARM_UP_TOKENS = 64
_ANY_NUMBER = 2**31
