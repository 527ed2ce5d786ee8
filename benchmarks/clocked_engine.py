"""The engine process of `decode_trace.py`: the engine as it is served, with clocks around its runner.

    python benchmarks/clocked_engine.py DIRECTORY

Started by the benchmark with the engine's private directory, as the server starts `tokenspeed.engine.process`. What the
clocks say of the last steps is written when a profile begins, beside its trace. No torch before the engine wants it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.engine.process import main
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.protocol.step import StepPlan, StepResult
from tokenspeed.runner.interface import Pending, Runner

CLOCKED_STEPS = 40


class Clock(msgspec.Struct):
    """Of the last `CLOCKED_STEPS` steps before a profile, seconds each.

    Fields:
        steps: from one launch to the next.
        hosts: processor time of the loop's thread in between, but for waiting for the device.
        launches, results: the parts of it that the runner takes.
    """

    steps: list[float]
    hosts: list[float]
    launches: list[float]
    results: list[float]


def clock_file(output_dir: str, profile_id: str) -> Path:
    """Where the clock of a profile is."""
    return Path(output_dir) / f"{profile_id}.clock.json"


class ClockedStep:
    """A step of the GPU runner; notes what making its result took, and what waiting for it did.

    Args:
        wait: until the device is done.
    """

    def __init__(self, step: Pending[StepResult], wait: Callable[[], None], clock: ClockedRunner) -> None:
        self._step = step
        self._wait = wait
        self._clock = clock

    def result(self) -> StepResult:
        began = time.thread_time()
        self._wait()
        waited = time.thread_time()
        result = self._step.result()
        self._clock.results.append(time.thread_time() - waited)
        self._clock.waited_s += waited - began
        return result


class ClockedRunner:
    """A runner that takes the processor time of the loop's thread: all of it but waiting, launches and results."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[tuple[float, float]] = []  # (seconds between two plans, processor seconds but for waiting)
        self.launches: list[float] = []
        self.results: list[float] = []
        self.waited_s = 0.0
        self._last_s = self._last_cpu_s = 0.0

    @property
    def groups(self) -> list[GroupSpec]:
        return self._runner.groups

    @property
    def report(self) -> list[str]:
        return self._runner.report

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._runner.grammars

    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        now_s, cpu_s = time.perf_counter(), time.thread_time() - self.waited_s
        self.steps.append((now_s - self._last_s, cpu_s - self._last_cpu_s))
        self._last_s, self._last_cpu_s = now_s, cpu_s
        began = time.thread_time()
        step = self._runner.execute(plan)
        self.launches.append(time.thread_time() - began)
        wait: Callable[[], None] | None = getattr(step, "wait", None)  # other runners' steps know no such thing
        return step if wait is None else ClockedStep(step, wait, self)

    def start_profile(self, options: ProfileOptions) -> Pending[str]:
        if options.output_dir is not None and options.profile_id is not None:
            last = self.steps[-CLOCKED_STEPS:]
            clock = Clock(
                [step_s for step_s, _ in last],
                [host_s for _, host_s in last],
                self.launches[-CLOCKED_STEPS:],
                self.results[-CLOCKED_STEPS:],
            )
            clock_file(options.output_dir, options.profile_id).write_bytes(msgspec.json.encode(clock))
        return self._runner.start_profile(options)

    def stop_profile(self) -> Pending[str]:
        return self._runner.stop_profile()

    def capture(self) -> None:
        self._runner.capture()

    def close(self) -> None:
        self._runner.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: clocked_engine.py DIRECTORY   (decode_trace.py starts it; it is of no use by hand)")
    sys.exit(main(ClockedRunner))
