"""The engine's loop: inbox -> scheduler -> runner -> outbox, overlapped by one step, and its plain twin.

May be added here: another message, another order of the same calls. Not here: who runs and with which pages
(scheduler/), how a step is computed (runner/), anything about text (the client).

    step N on the device      |--------- N ---------|--------- N+1 -------|
    host, overlapped           plan N+1, wait for N  | apply N, send, plan N+2, wait for N+1
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Protocol

from tokenspeed.engine.channel import EngineEnd
from tokenspeed.engine.grammar_gate import GrammarGate
from tokenspeed.engine.step_log import DECODE_INTERVAL_STEPS, StepLog
from tokenspeed.protocol.errors import TokenSpeedError
from tokenspeed.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineStats,
    FinishReason,
    News,
    Outputs,
    ProfileOptions,
    Reply,
    SequenceOutput,
    Shutdown,
    ToEngine,
)
from tokenspeed.protocol.step import StepPlan, StepResult
from tokenspeed.runner.interface import Pending, Runner
from tokenspeed.scheduler.outcome import refusals

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
GRAMMAR_POLL_S = 0.005  # how often an idle loop looks whether a grammar is compiled
ORPHAN_CHECK_S = 1.0  # how long an engine may outlive its parent


class SchedulerFace(Protocol):
    """What the loop asks of `scheduler.scheduler.Scheduler`."""

    def add(self, request: AddRequest) -> list[SequenceOutput]: ...

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]: ...

    def abort_all(self, finish_reason: FinishReason = "abort", error: str | None = None) -> list[SequenceOutput]: ...

    def plan(self) -> StepPlan | None: ...

    def apply(self, result: StepResult) -> News: ...

    def stats(self) -> EngineStats: ...

    def check(self) -> None: ...

    def flush_cache(self) -> str | None: ...


class EngineCore:
    """One engine: a scheduler and a runner, driven by one thread.

    Args:
        channel: the engine's end; only this loop uses it.
        enable_overlap: queue step N+1 before the tokens of step N are read.
        parent_pid: the process that must stay alive, or None; the loop ends when it is gone.
        warm_idle_s: how long the loop must have been idle before it opens the grammar library ahead of need; 0 = it
            does so at once.
        decode_log_interval: see `StepLog`.
    """

    def __init__(
        self,
        channel: EngineEnd,
        scheduler: SchedulerFace,
        runner: Runner,
        *,
        enable_overlap: bool,
        parent_pid: int | None = None,
        warm_idle_s: float = math.inf,
        decode_log_interval: int = DECODE_INTERVAL_STEPS,
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = GrammarGate(runner.grammars)
        self._enable_overlap = enable_overlap
        self._parent_pid = parent_pid
        self._warm_idle_s = warm_idle_s if runner.grammars is not None else math.inf
        self._stopping = False
        self._log = StepLog(decode_log_interval)
        self._step_tokens: list[int] = []
        self._stats_sent_s = 0.0
        self._orphan_checked_s = 0.0

    def run(self) -> None:
        """Serve until `Shutdown`, or until the parent is gone.

        Raises:
            Exception: a step failed, or scheduler or runner broke: the engine cannot go on. What still ran has its
                terminal event, as far as the scheduler still could; `Fatal` is the caller's to send.
        """
        try:
            self._warm_grammars(0.0)
            if self._enable_overlap:
                self._run_overlapped()
            else:
                self._run_plain()
        except Exception as error:
            self._end_all("error", f"the engine failed: {type(error).__name__}: {error}")
            raise

    def _run_overlapped(self) -> None:
        """The device has step N+1 queued before the host looks at the tokens of N, so it never waits for the host."""
        running: tuple[StepPlan, Pending[StepResult]] | None = None
        idle = True
        while not self._stopping:
            self._take_messages(idle)
            queued = self._start_step()
            if running is not None:
                self._finish_step(*running)
            idle = queued is None and running is None
            running = queued

    def _run_plain(self) -> None:
        """Plan, run, apply, one after the other."""
        idle = True
        while not self._stopping:
            self._take_messages(idle)
            step = self._start_step()
            if step is not None:
                self._finish_step(*step)
            idle = step is None

    def _start_step(self) -> tuple[StepPlan, Pending[StepResult]] | None:
        plan = None if self._stopping else self._scheduler.plan()
        return None if plan is None else (plan, self._runner.execute(plan))

    def _finish_step(self, plan: StepPlan, pending: Pending[StepResult]) -> None:
        self._send_outputs(self._scheduler.apply(pending.result()))
        now_s = time.monotonic()
        if now_s - self._stats_sent_s >= STATS_INTERVAL_S:
            self._send_stats(now_s)
            self._check_parent()
        self._log.note(plan, self._snapshot)

    def _take_messages(self, idle: bool) -> None:
        """Handle what has arrived. When idle there is nothing else to do: refresh the metrics, then sleep until a
        message comes."""
        messages = self._channel.receive(0)
        if idle and not messages:
            stats = self._send_stats(time.monotonic())
            if stats.num_running + stats.num_waiting:
                raise RuntimeError(
                    f"the scheduler plans nothing, yet {stats.num_running} sequences run and {stats.num_waiting} wait"
                )
            idle_since_s = time.monotonic()
            while not messages and not self._stopping:
                messages = self._channel.receive(self._nap_s())
                self._check_parent()
                if not messages:
                    self._warm_grammars(time.monotonic() - idle_since_s)
                if self._grammars.is_holding:
                    break
            self._log.resume()
        for message in messages:
            self._handle(message)
        if self._grammars.is_holding:
            self._release_compiled()

    def _nap_s(self) -> float | None:
        """How long an idle loop may sleep."""
        if self._grammars.is_holding:
            return GRAMMAR_POLL_S
        longest_s = min(math.inf if self._parent_pid is None else ORPHAN_CHECK_S, self._warm_idle_s)
        return longest_s if longest_s < math.inf else None

    def _warm_grammars(self, idle_s: float) -> None:
        """Open the grammar library, once, when the loop has been idle for long enough."""
        if idle_s >= self._warm_idle_s:
            self._warm_idle_s = math.inf
            assert self._runner.grammars is not None
            self._runner.grammars.warm()

    def _release_compiled(self) -> None:
        ready, outputs = self._grammars.release()
        self._send_outputs(outputs)
        for request, unwanted in ready:
            self._add(request)
            for index in unwanted:
                self._send_outputs(self._scheduler.abort(request.request_id, index))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                if message.grammar is None:
                    self._add(message)
                else:
                    self._send_outputs(self._grammars.hold(message))
            case AbortRequest(request_id=request_id, index=index):
                self._send_outputs(self._grammars.abort(request_id, index))
                self._send_outputs(self._scheduler.abort(request_id, index))
            case Command():
                self._channel.send(self._answer(message))
            case Shutdown():
                self._stopping = True
                self._end_all("abort")

    def _add(self, request: AddRequest) -> None:
        """A request the scheduler cannot take fails alone."""
        try:
            outputs = self._scheduler.add(request)
        except Exception as error:
            logger.exception("request %s could not be added", request.request_id)
            outputs = refusals(request, f"the engine could not take the request: {error}")
        self._send_outputs(outputs)

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """The last terminal events of this engine. A broken scheduler may be unable to name them; then the client ends
        them itself when it reads `Fatal` or finds the process gone."""
        self._send_outputs(self._grammars.abort_all(reason, error))
        try:
            self._send_outputs(self._scheduler.abort_all(reason, error))
        except Exception:
            logger.exception("the live sequences could not be ended one by one")

    def _answer(self, command: Command) -> Reply:
        """A command that fails says why; it never ends the loop."""
        try:
            match command.name:
                case "ping":
                    return Reply(call_id=command.call_id, ok=True)
                case "stats":
                    return Reply(call_id=command.call_id, ok=True, stats=self._take_snapshot())
                case "check":
                    self._scheduler.check()
                    return Reply(call_id=command.call_id, ok=True)
                case "flush_cache":
                    refusal = self._scheduler.flush_cache()
                    return Reply(call_id=command.call_id, ok=refusal is None, error=refusal)
                case "start_profile":
                    started = self._runner.start_profile(command.profile or ProfileOptions())
                    return Reply(call_id=command.call_id, ok=True, text=started.result())
                case "stop_profile":
                    return Reply(call_id=command.call_id, ok=True, text=self._runner.stop_profile().result())
        except TokenSpeedError as error:
            return Reply(call_id=command.call_id, ok=False, error=str(error))
        except Exception as error:
            logger.exception("command %s failed", command.name)
            return Reply(call_id=command.call_id, ok=False, error=f"{type(error).__name__}: {error}")

    def _send_outputs(self, outputs: News) -> None:
        if outputs:
            if isinstance(outputs, list):  # else nobody has ended
                self._grammars.note(outputs)
            self._channel.send(Outputs(outputs))

    def _send_stats(self, now_s: float) -> EngineStats:
        self._stats_sent_s = now_s
        stats = self._take_snapshot()
        self._channel.send(stats)
        return stats

    def _snapshot(self) -> EngineStats:
        """The numbers now, for the log: the scheduler's, and who waits in front of it. Each call of `stats` empties its
        list of steps, which the metrics must see whole: it is kept for the next `_take_snapshot`."""
        stats = self._scheduler.stats()
        stats.num_compiling = self._grammars.num_sequences
        stats.num_grammars, stats.grammar_bytes = self._grammars.memory
        self._step_tokens += stats.step_tokens
        return stats

    def _take_snapshot(self) -> EngineStats:
        """The numbers with every step since the last one taken, to send."""
        stats = self._snapshot()
        stats.step_tokens, self._step_tokens = self._step_tokens, []
        return stats

    def _check_parent(self) -> None:
        """An engine whose parent died has nobody to serve; SIGKILL gives the parent no chance to say so."""
        now_s = time.monotonic()
        if self._parent_pid is None or now_s - self._orphan_checked_s < ORPHAN_CHECK_S:
            return
        self._orphan_checked_s = now_s
        if os.getppid() != self._parent_pid:
            logger.error("the server process %d is gone; the engine stops", self._parent_pid)
            self._stopping = True
