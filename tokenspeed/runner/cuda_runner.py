"""The runner on a GPU: launches plans in order, never waits for the device, hands results over when they come.

Two threads. The launching one turns a plan into copies and kernels on one stream; everything a step needs is either on
the device already or travels through pinned memory. The finishing one waits for a step's event, then completes its
future. So plan N+1 is launched while step N runs, and the token that N samples never visits the host in between.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.triton.registered import has_pdl
from tokenspeed.kernels.triton.sampling import masked_rows, sample_rows
from tokenspeed.kernels.upload import send, to_device
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.protocol.step import Row, RowResult, StepPlan, StepResult
from tokenspeed.runner.constraints import Constraints, Fault
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.grammar_rows import GrammarRows
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.memory import PREFILL_GRAPH_REQUESTS
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.profiler import StepProfiler
from tokenspeed.runner.prompt_logprobs import PendingPrompt, PromptLogprobs
from tokenspeed.runner.slot_sampling import SlotParameters
from tokenspeed.sampling.sampler import NAN_LOGITS, SampledBatch, Sampler

NUM_STAGING = 4  # steps whose pinned buffers may be in use: two in flight, one being read, one being filled


@dataclass(slots=True)
class _Sampled:
    """Tokens of some rows on their way to the host.

    Fields:
        token_ids: pinned [n] int32, by the sampling kernels.
        eager: of the rows that the eager sampler did instead: row -> row of `eager_batch`.
        errors: why a slot's sequence cannot go on, as its grammar sees it.
    """

    token_ids: torch.Tensor
    eager: dict[int, int] = field(default_factory=dict)
    eager_batch: SampledBatch | None = None
    errors: dict[int, Fault] = field(default_factory=dict)


@dataclass(slots=True)
class _Launched:
    """A step on the device: everything needed to build its result once `done` has passed."""

    plan: StepPlan
    done: torch.cuda.Event
    parts: list[tuple[list[Row], _Sampled]]
    prompts: dict[int, PendingPrompt]


def _nothing() -> None:
    """For runners that nobody watches."""


def _pinned(count: int) -> torch.Tensor:
    """Numbers of a step on their way to the device, [count] int32."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True)


@dataclass(slots=True)
class _Staging:
    """Pinned buffers of one step: asking the driver for pinned memory each time costs more than filling it.

    Fields:
        rows: input of a decode graph. prompts: input of a prompt graph. sampled: where sampled tokens arrive.
        num_sampled: how much of it this step has taken.
    """

    rows: torch.Tensor
    prompts: torch.Tensor
    sampled: torch.Tensor
    num_sampled: int = 0

    def take_sampled(self, count: int) -> torch.Tensor:
        """Room for `count` sampled tokens, [count] int32."""
        start = self.num_sampled
        self.num_sampled += count
        return self.sampled[start : self.num_sampled]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What `capture` does.

    Fields:
        sizes: decode batch sizes to record; empty = decode steps run eagerly. pad: see `DecodeGraphs.capture`.
        prefill_sizes: token counts of prompt steps to record; empty = prompts run eagerly.
        warm_up: steps to run afterwards, for the kernels that no graph holds.
        ready: called at the end: from here on nothing should have to be compiled.
    """

    sizes: tuple[int, ...] = ()
    pad: bool = True
    prefill_sizes: tuple[int, ...] = ()
    warm_up: tuple[StepPlan, ...] = ()
    ready: Callable[[], None] = _nothing


class CudaModelRunner:
    """Satisfies `runner.interface.Runner`.

    Args:
        loaded: the model over the pages of `groups`, its kernels and its report, which the runner continues.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: list[GroupSpec],
        limits: Limits,
        graphs: GraphPlan,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        model, backend, ops, vocab_size = loaded.model, loaded.backend, loaded.ops, limits.vocab_size
        self._model = model
        self._backend = backend
        self.groups = groups
        self.report = loaded.report
        self._graph_plan = graphs
        self.grammars = grammars
        self._device = ops.device
        num_slots = limits.max_num_seqs + 1  # the last is scratch: padding rows of graphs
        self._state = DeviceState(num_slots, limits.max_model_len, groups, ops.device)
        self._parameters = SlotParameters(num_slots, ops.device)
        self._sampler = Sampler(num_slots, vocab_size, ops.device)
        self._prompts = PromptLogprobs(model, self._state.token_ids)
        self._grammar_rows = GrammarRows(Constraints(grammars, vocab_size), ops.device)
        self._pdl = has_pdl(ops.device)
        self._graphs: DecodeGraphs | None = None
        self._prefill: PrefillGraphs | None = None
        self._is_warm = False  # before that, prompts run eagerly: warm-up is for what no graph holds
        if ops.recorder is not None and backend.can_record:
            parts = (model, backend, ops.recorder, self._state, self._parameters.sampling)
            if graphs.sizes:
                self._graphs = DecodeGraphs(*parts, limits.max_num_seqs, self._pdl)
            if graphs.prefill_sizes:
                self._prefill = PrefillGraphs(*parts, limits.max_num_seqs, self._pdl)
        self._staging = [
            _Staging(_pinned(2 * num_slots), _pinned(4 * PREFILL_GRAPH_REQUESTS), _pinned(num_slots))
            for _ in range(NUM_STAGING)
        ]
        self._stream = torch.cuda.Stream(ops.device)  # type: ignore[no-untyped-call]
        self._profiler = StepProfiler(has_gpu=True)
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner-launch")
        self._in_flight: queue.SimpleQueue[tuple[_Launched, Future[StepResult]] | None] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name="runner-finish", daemon=True)
        self._finisher.start()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._launcher.submit(self._launch_into, plan, future)
        return future

    def start_profile(self, options: ProfileOptions) -> Future[str]:
        return self._launcher.submit(self._profiler.start, options)

    def stop_profile(self) -> Future[str]:
        return self._launcher.submit(self._profiler.stop)

    def capture(self) -> None:
        with startup_phase("graph.capture"):
            self.on_device(self._record)
        for plan in self._graph_plan.warm_up:
            self.execute(plan).result()
        self._is_warm = True
        self._graph_plan.ready()

    def _record(self) -> None:
        plan = self._graph_plan
        reason = "" if self._backend.can_record else f" ({self._backend.name} attention cannot be recorded)"
        if self._graphs is None:
            self.report.append(f"decode graphs: none, decode steps run eagerly{reason}")
        else:
            self._graphs.capture(plan.sizes, plan.pad)
            self.report.append(f"decode graphs: {len(plan.sizes)} sizes up to {max(plan.sizes)} rows")
        if self._prefill is None:
            self.report.append(f"prefill graphs: none, prompts run eagerly{reason}")
        else:
            self._prefill.capture(plan.prefill_sizes)
            self.report.append(
                f"prefill graphs: {len(plan.prefill_sizes)} sizes up to {max(plan.prefill_sizes)} tokens of at most "
                f"{PREFILL_GRAPH_REQUESTS} requests"
            )

    def on_device(self, work: Callable[[], None]) -> None:
        """Run on the launching thread and stream, and wait for the device (start-up and benchmarks)."""

        def run() -> None:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                work()
            self._stream.synchronize()

        self._launcher.submit(run).result()

    def close(self) -> None:
        self._launcher.submit(self._profiler.close)
        self._launcher.shutdown(wait=True)
        self._in_flight.put(None)
        self._finisher.join()
        if self.grammars is not None:
            self.grammars.close()

    # ---- launching ------------------------------------------------------------------------------------------------

    def _launch_into(self, plan: StepPlan, future: Future[StepResult]) -> None:
        try:
            with self._profiler.step(plan.step_id), torch.inference_mode(), torch.cuda.stream(self._stream):
                launched = self._launch(plan)
        except BaseException as error:  # the whole step failed: the engine must know, whatever it was
            future.set_exception(error)
            return
        self._in_flight.put((launched, future))

    def _launch(self, plan: StepPlan) -> _Launched:
        for admission in plan.admissions:
            self._state.admit(admission)
            self._sampler.admit(admission)
            self._parameters.admit(admission)
            self._prompts.admit(admission)
            self._grammar_rows.admit(admission)
        self._state.grow(plan.rows)
        num_decodes = sum(row.is_decode for row in plan.rows)
        decodes, others = plan.rows[:num_decodes], plan.rows[num_decodes:]
        parts: list[tuple[list[Row], _Sampled]] = []
        prompts: dict[int, PendingPrompt] = {}
        staging = self._staging[plan.step_id % NUM_STAGING]
        staging.num_sampled = 0
        size = self._graphs.size_for(num_decodes) if self._graphs is not None else None
        if size is None:
            others = plan.rows
        else:
            parts.append((decodes, self._replay(decodes, size, staging)))
        if others:
            sampling = [row for row in others if row.samples]
            recorded = self._prefill_size(others)
            if recorded is not None:
                parts.append((sampling, self._replay_prefill(others, sampling, recorded, staging)))
            else:
                logits = self._eager(others, prompts)
                if sampling:
                    parts.append((sampling, self._sample(sampling, logits, staging)))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return _Launched(plan, done, parts, prompts)

    def _replay(self, rows: list[Row], size: int, staging: _Staging) -> _Sampled:
        assert self._graphs is not None
        decode = self._graphs.graph(size)
        slots = [row.slot for row in rows]
        pad = size - len(rows)
        host = staging.rows[: 2 * size].view(2, size)
        numbers = host.numpy()
        numbers[0] = slots + [self._graphs.scratch_slot] * pad
        numbers[1] = [row.start for row in rows] + [0] * pad
        decode.rows.copy_(host, non_blocking=True)
        decode.graph.replay()
        return self._to_host(rows, slots, decode.token_ids[: len(rows)], decode.logits, staging)

    def _prefill_size(self, rows: list[Row]) -> int | None:
        """The recorded token count that serves rows without a decode graph; None: they run eagerly."""
        if self._prefill is None or not self._is_warm or any(self._prompts.wants(row.slot) for row in rows):
            return None
        return self._prefill.size_for(rows)

    def _replay_prefill(self, rows: list[Row], sampling: list[Row], size: int, staging: _Staging) -> _Sampled:
        assert self._prefill is not None
        prefill = self._prefill.graph(size)
        host = staging.prompts[: prefill.rows.numel()].view(prefill.rows.shape)
        self._prefill.fill(host, [*sampling, *(row for row in rows if not row.samples)])
        prefill.rows.copy_(host, non_blocking=True)
        prefill.graph.replay()
        slots = [row.slot for row in sampling]
        return self._to_host(sampling, slots, prefill.token_ids[: len(slots)], prefill.logits, staging)

    def _eager(self, rows: list[Row], prompts: dict[int, PendingPrompt]) -> torch.Tensor:
        """Forward of any rows; logits [n, V] float32 of those that sample."""
        inputs = self._state.gather(rows)
        self._backend.plan(inputs.batch)
        last, end = [], 0
        for row in rows:
            end += row.num_tokens
            if row.samples:
                last.append(end - 1)
        wanted = to_device(last, torch.int64, self._device)
        if not any(self._prompts.wants(row.slot) for row in rows):
            hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch, wanted)
            return self._model.logits(hidden)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        end = 0
        for row in rows:
            if self._prompts.wants(row.slot):
                prompts[row.slot] = self._prompts.launch(row, hidden[end : end + row.num_tokens])
            end += row.num_tokens
        return self._model.logits(hidden[wanted])

    def _sample(self, rows: list[Row], logits: torch.Tensor, staging: _Staging) -> _Sampled:
        slots = [row.slot for row in rows]
        positions = to_device([row.start + row.num_tokens for row in rows], torch.int64, self._device)
        where = to_device(slots, torch.int32, self._device)
        token_ids = sample_rows(logits, where, positions, self._parameters.sampling, self._state.token_ids, self._pdl)
        if (
            not self._is_warm
        ):  # no row of the warm-up is constrained, and the first that is must not wait for a compiler
            masked_rows(logits, torch.zeros_like(positions[:1]), logits.new_zeros(1, -(-logits.shape[1] // 32)).int())
        return self._to_host(rows, slots, token_ids, logits, staging)

    def _to_host(
        self, rows: list[Row], slots: list[int], token_ids: torch.Tensor, logits: torch.Tensor, staging: _Staging
    ) -> _Sampled:
        """Start the copy of sampled tokens; redo the rows that the graph could not sample by itself."""
        held = self._grammar_rows.rows(slots)
        eager = self._parameters.eager_rows(slots)
        errors: dict[int, Fault] = {}
        if held:
            errors = self._grammar_rows.catch_up([slots[row] for row in held])
            done_eagerly = set(eager)
            self._redraw(rows, [row for row in held if row not in done_eagerly], token_ids, logits)
            self._grammar_rows.sampled(slots, token_ids)
        host = staging.take_sampled(len(rows))
        host.copy_(token_ids, non_blocking=True)
        if not eager:
            return _Sampled(host, errors=errors)
        mine = [rows[row] for row in eager]
        my_slots = [row.slot for row in mine]
        positions = [row.start + row.num_tokens for row in mine]
        index = to_device(eager, torch.int64, self._device)
        masks = self._grammar_rows.masks(my_slots)
        batch = self._sampler.sample(logits[index].float(), my_slots, positions, masks)
        where = to_device([my_slots, positions], torch.int64, self._device)
        self._state.append_sampled(where[0], where[1], batch.token_ids)
        self._grammar_rows.sampled(my_slots, batch.token_ids)
        return _Sampled(host, {row: order for order, row in enumerate(eager)}, batch, errors)

    def _redraw(self, rows: list[Row], held: list[int], token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Sample the rows `held` again, as far as their grammars constrain them, into `token_ids` and their slots."""
        masks = self._grammar_rows.masks([rows[row].slot for row in held])
        if masks is None:
            return
        mine = [held[place] for place in masks.rows]
        index = to_device(mine, torch.int64, self._device)
        slots = to_device([rows[row].slot for row in mine], torch.int32, self._device)
        positions = to_device([rows[row].start + rows[row].num_tokens for row in mine], torch.int64, self._device)
        allowed = masked_rows(logits, index, send(torch.from_numpy(masks.words), self._device))
        drawn = sample_rows(allowed, slots, positions, self._parameters.sampling, self._state.token_ids, self._pdl)
        token_ids.index_copy_(0, index, drawn)

    # ---- finishing ------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        while (item := self._in_flight.get()) is not None:
            launched, future = item
            try:
                launched.done.synchronize()
                with torch.inference_mode(), torch.cuda.stream(self._finish_stream()):
                    result = self._result(launched)
            except BaseException as error:  # as above: never leave a future without an end
                future.set_exception(error)
            else:
                future.set_result(result)

    def _finish_stream(self) -> torch.cuda.Stream:
        """Conversions of finished results wait for nothing that was launched since."""
        return torch.cuda.default_stream(self._device)

    def _result(self, launched: _Launched) -> StepResult:
        found: dict[int, RowResult] = {}
        prompts = {slot: pending.finish() for slot, pending in launched.prompts.items()}
        for rows, sampled in launched.parts:
            eager = sampled.eager_batch.finish() if sampled.eager_batch is not None else []
            for index, (row, token_id) in enumerate(zip(rows, sampled.token_ids.tolist(), strict=True)):
                order = sampled.eager.get(index)
                if order is not None:
                    outcome = eager[order]
                    fault = Fault(outcome.error) if outcome.error else sampled.errors.get(row.slot)
                    found[row.slot] = RowResult(
                        slot=row.slot,
                        token_ids=[] if fault else [outcome.token_id],
                        logprobs=[outcome.logprobs] if outcome.logprobs and not fault else [],
                        prompt_logprobs=prompts.get(row.slot, []),
                        error=fault.error if fault else None,
                        error_code=fault.code if fault else None,
                    )
                elif token_id < 0:
                    found[row.slot] = RowResult(row.slot, [], error=NAN_LOGITS)
                elif row.slot in sampled.errors:
                    fault = sampled.errors[row.slot]
                    found[row.slot] = RowResult(row.slot, [], error=fault.error, error_code=fault.code)
                else:
                    found[row.slot] = RowResult(row.slot, [token_id], prompt_logprobs=prompts.get(row.slot, []))
        return StepResult(
            launched.plan.step_id,
            [
                found.get(row.slot) or RowResult(row.slot, [], prompt_logprobs=prompts.get(row.slot, []))
                for row in launched.plan.rows
            ],
        )
