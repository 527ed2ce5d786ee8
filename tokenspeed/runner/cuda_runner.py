"""The runner on a GPU: launches plans in order and does not wait for the device; whoever asks for a result does.

No thread of its own: a plan is launched on the caller's, copies and kernels on one stream. Everything a step needs is
either on the device already or travels through pinned memory. So plan N+1 is launched while step N runs, and the token
that N samples never visits the host in between. A thread for launching and one for results would each have to be woken
every step, on a core whose caches have forgotten them, and all of them share one interpreter anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.slot_ops import SlotOps
from tokenspeed.kernels.upload import to_device
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.protocol.step import Row, SteadyRows, SteadySet, StepPlan, StepResult
from tokenspeed.runner.decode_graphs import DecodeGraphs, SteadyInput
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.drawing import Drawing, Landing
from tokenspeed.runner.interface import Pending
from tokenspeed.runner.launched_step import LaunchedStep, Sampled
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.memory import PREFILL_GRAPH_REQUESTS
from tokenspeed.runner.memory_errors import MemoryErrors
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.picked_rows import PickedRoom
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.profiler import StepProfiler
from tokenspeed.runner.prompt_logprobs import PendingPrompt, PromptLogprobs
from tokenspeed.runner.slot_graphs import SlotGraph

NUM_STAGING = 2  # steps that may be in flight


def _nothing() -> None:
    """For runners that nobody watches."""


def _pinned(count: int) -> torch.Tensor:
    """Numbers of a step on their way to the device, [count] int32."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Steady:
    """What the steps of one steady set have in common, as long as they use one staging.

    Fields:
        host: its input, pinned, and `input` the one who fills it. token_ids: on the device.
    """

    members: SteadySet
    decode: SlotGraph
    host: torch.Tensor
    input: SteadyInput
    token_ids: torch.Tensor
    landing: Landing


@dataclass(slots=True)
class _Staging:
    """Pinned buffers of one step: asking the driver for pinned memory each time costs more than filling it.

    Fields:
        rows: input of a decode graph. prompts: input of a prompt graph. sampled: where sampled tokens arrive.
        done: behind the step that has the buffers.
        picked: for rows that are drawn again, on both sides.
        step: that step, whose result must be taken before another has them.
        num_sampled: how much of `sampled` it has taken.
        decode_inputs: `rows` as each graph takes it, on both sides.
        steady: of the steady set that had the buffers last.
    """

    rows: torch.Tensor
    prompts: torch.Tensor
    sampled: torch.Tensor
    done: torch.cuda.Event
    picked: PickedRoom
    step: LaunchedStep | None = None
    num_sampled: int = 0
    decode_inputs: dict[torch.Size, tuple[torch.Tensor, NDArray[np.int32]]] = field(default_factory=dict)
    steady: _Steady | None = None

    def begin(self) -> None:
        """Another step takes the buffers; waits if need be."""
        if self.step is not None:
            self.step.result()
            self.step = None
        self.num_sampled = 0
        self.picked.clear()

    def land(self, count: int) -> Landing:
        """Room for `count` sampled tokens."""
        start = self.num_sampled
        self.num_sampled += count
        return Landing(self.sampled[start : self.num_sampled], self.done, self.picked)

    def decode_input(self, shape: torch.Size) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """Room for the input of a decode graph, as a tensor and for numpy."""
        known = self.decode_inputs.get(shape)
        if known is None:
            host = self.rows[: shape.numel()].view(shape)
            known = self.decode_inputs[shape] = (host, host.numpy())
        return known


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What `capture` does.

    Fields:
        sizes: decode batch sizes to record; empty = decode steps run eagerly. pad: see `DecodeGraphs.capture`.
        prefill_sizes: token counts of prompt steps to record; empty = prompts run eagerly.
        warm_up: steps to run afterwards, for the kernels that no graph holds.
        ready: called at the end: from here on nothing should have to be compiled.
        memory_errors: what becomes of an error for want of memory, here and in steps.
    """

    sizes: tuple[int, ...] = ()
    pad: bool = True
    prefill_sizes: tuple[int, ...] = ()
    warm_up: tuple[StepPlan, ...] = ()
    ready: Callable[[], None] = _nothing
    memory_errors: MemoryErrors = field(default_factory=MemoryErrors)


class CudaModelRunner:
    """Satisfies `runner.interface.Runner`.

    The thread that makes it is its own until `close`: it stays in inference mode and on the runner's stream. (Entering
    both for each step takes as long as all else that a launch of 64 rows does in Python, 20 us on a 2-core Xeon.)

    Args:
        loaded: the model over the pages of `groups`, its kernels and its report, which the runner continues.
        slot_ops: the kernels for what is kept in slots.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        slot_ops: SlotOps,
        groups: list[GroupSpec],
        limits: Limits,
        graphs: GraphPlan,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        model, backend, ops = loaded.model, loaded.backend, loaded.ops
        self._model = model
        self._backend = backend
        self.groups = groups
        self.report = loaded.report
        self._graph_plan = graphs
        self.grammars = grammars
        self._device = ops.device
        num_slots = limits.max_num_seqs + 1  # the last is scratch: padding rows of graphs
        self._state = DeviceState(num_slots, limits.max_model_len, groups, ops.device)
        self._prompts = PromptLogprobs(model, self._state.token_ids)
        self._drawing = Drawing(self._state, slot_ops, limits.vocab_size, grammars)
        self._graphs: DecodeGraphs | None = None
        self._prefill: PrefillGraphs | None = None
        self._is_warm = False  # before that, prompts run eagerly: warm-up is for what no graph holds
        if ops.recorder is not None and backend.can_record:
            parts = (model, backend, slot_ops, ops.recorder, self._state, self._drawing.sampling)
            if graphs.sizes:
                self._graphs = DecodeGraphs(*parts, limits.max_num_seqs)
            if graphs.prefill_sizes:
                self._prefill = PrefillGraphs(*parts, limits.max_num_seqs)
        self._staging = [
            _Staging(
                _pinned((2 + len(groups)) * num_slots),
                _pinned(4 * PREFILL_GRAPH_REQUESTS),
                _pinned(num_slots),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
                self._drawing.picked_room(),
            )
            for _ in range(NUM_STAGING)
        ]
        self._stream = torch.cuda.Stream(ops.device)  # type: ignore[no-untyped-call]
        self._side = torch.cuda.default_stream(ops.device)
        self._side.synchronize()  # what is above, and the weights, were written there
        self._profiler = StepProfiler(has_gpu=True)
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(torch.inference_mode())
        self._entered.enter_context(torch.cuda.stream(self._stream))

    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        staging = self._staging[plan.step_id % NUM_STAGING]
        try:
            staging.begin()
            with self._profiler.step(plan.step_id):
                staging.step = self._launch(plan, staging)
        except Exception as error:  # the whole step failed: who asks for its result must know, whatever it was
            with contextlib.suppress(RuntimeError):  # a device that has failed
                self._stream.synchronize()  # what was queued of it reads the buffers that the next step fills
            return _failed(self._graph_plan.memory_errors.of_step(error))
        return staging.step

    def start_profile(self, options: ProfileOptions) -> Pending[str]:
        return _finished(lambda: self._profiler.start(options))

    def stop_profile(self) -> Pending[str]:
        return _finished(self._profiler.stop)

    def capture(self) -> None:
        """See `Runner.capture`.

        Raises:
            ConfigError: no memory is left for the recorded steps.
        """
        with self._graph_plan.memory_errors.during("capture"):
            with startup_phase("graph.capture"):
                self._record()
                self._stream.synchronize()
            with startup_phase("kernels.warm_up"):
                for plan in self._graph_plan.warm_up:
                    self.execute(plan).result()
                recorded = [graphs for graphs in (self._graphs, self._prefill) if graphs is not None]
                dtypes = {torch.float32, *(graphs.logits_dtype for graphs in recorded)}
                self._drawing.warm_up(dtypes, self._staging[0].picked)
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

    def close(self) -> None:
        self._profiler.close()
        with contextlib.suppress(RuntimeError):  # a device that has failed: its steps have said so
            self._stream.synchronize()
        self._entered.close()
        if self.grammars is not None:
            self.grammars.close()

    # ---- launching ------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, staging: _Staging) -> LaunchedStep:
        for admission in plan.admissions:
            self._state.admit(admission)
            self._drawing.admit(admission)
            self._prompts.admit(admission)
        parts: list[tuple[list[Row] | SteadyRows, Sampled]] = []
        prompts: dict[int, PendingPrompt] = {}
        decodes, others = plan.rows, []
        num_decodes = plan.num_decodes
        if num_decodes < len(decodes):
            decodes, others = decodes[:num_decodes], decodes[num_decodes:]
        size = self._graphs.size_for(num_decodes) if self._graphs is not None else None
        if size is None:
            others = list(plan.rows)
        elif isinstance(decodes, SteadyRows):
            parts.append((decodes, self._replay_steady(decodes, size, staging)))
        else:
            parts.append((decodes, self._replay(decodes, size, staging)))
        if others:
            self._state.grow(others)
            sampling = [row for row in others if row.samples]
            recorded = self._prefill_size(others)
            if recorded is not None:
                parts.append((sampling, self._replay_prefill(others, sampling, recorded, staging)))
            else:
                logits = self._eager(others, prompts)
                if sampling:
                    parts.append((sampling, self._sample(sampling, logits, staging)))
        staging.done.record(self._stream)
        return LaunchedStep(plan, staging.done, parts, prompts, self._side)

    def _replay(self, rows: list[Row], size: int, staging: _Staging) -> Sampled:
        assert self._graphs is not None
        decode = self._graphs.graph(size)
        slots = [row.slot for row in rows]
        host, numbers = staging.decode_input(decode.rows.shape)
        self._graphs.fill(numbers, rows, slots)
        decode.rows.copy_(host, non_blocking=True)
        decode.graph.replay()
        token_ids, landing = decode.token_ids[: len(rows)], staging.land(len(rows))
        return self._drawing.finish(rows, slots, token_ids, decode.logits, landing)

    def _replay_steady(self, rows: SteadyRows, size: int, staging: _Staging) -> Sampled:
        """As `_replay`, with what the set's steps have in common made once."""
        steady = staging.steady
        if steady is None or steady.members is not rows.members:
            steady = staging.steady = self._begin_steady(rows, size, staging)
        steady.input.fill(rows)
        steady.decode.rows.copy_(steady.host, non_blocking=True)
        steady.decode.graph.replay()
        return self._drawing.finish(rows, rows.members.slots, steady.token_ids, steady.decode.logits, steady.landing)

    def _begin_steady(self, rows: SteadyRows, size: int, staging: _Staging) -> _Steady:
        assert self._graphs is not None
        decode, members = self._graphs.graph(size), rows.members
        host, numbers = staging.decode_input(decode.rows.shape)
        given = self._graphs.steady_input(numbers, members)
        return _Steady(members, decode, host, given, decode.token_ids[: len(rows)], staging.land(len(rows)))

    def _prefill_size(self, rows: list[Row]) -> int | None:
        """The recorded token count that serves rows without a decode graph; None: they run eagerly."""
        if self._prefill is None or not self._is_warm or any(self._prompts.wants(row.slot) for row in rows):
            return None
        return self._prefill.size_for(rows)

    def _replay_prefill(self, rows: list[Row], sampling: list[Row], size: int, staging: _Staging) -> Sampled:
        assert self._prefill is not None
        prefill = self._prefill.graph(size)
        host = staging.prompts[: prefill.rows.numel()].view(prefill.rows.shape)
        self._prefill.fill(host, [*sampling, *(row for row in rows if not row.samples)])
        prefill.rows.copy_(host, non_blocking=True)
        prefill.graph.replay()
        slots = [row.slot for row in sampling]
        token_ids, landing = prefill.token_ids[: len(slots)], staging.land(len(slots))
        return self._drawing.finish(sampling, slots, token_ids, prefill.logits, landing)

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

    def _sample(self, rows: list[Row], logits: torch.Tensor, staging: _Staging) -> Sampled:
        slots = [row.slot for row in rows]
        token_ids = self._drawing.draw(logits, slots, [row.start + row.num_tokens for row in rows])
        return self._drawing.finish(rows, slots, token_ids, logits, staging.land(len(rows)))


def _finished(work: Callable[[], str]) -> Future[str]:
    """Done now; what it raises is kept for who asks."""
    future: Future[str] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _failed(error: Exception) -> Future[StepResult]:
    future: Future[StepResult] = Future()
    future.set_exception(error)
    return future
