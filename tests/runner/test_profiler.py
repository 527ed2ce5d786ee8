"""Profiles of steps: what the trace holds, when it ends, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_support import Plans, sum_runner

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.messages import ProfileOptions
from tokenspeed.runner.profiler import SUFFIX, StepProfiler


def events(path: str) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def names(path: str) -> set[str]:
    return {str(event.get("name")) for event in events(path)}


def work(profiler: StepProfiler, step_id: int) -> None:
    with profiler.step(step_id):
        torch.ones(3).mul(2.0)


def test_a_trace_names_steps_and_operations(tmp_path: Path) -> None:
    profiler = StepProfiler(has_gpu=False, environment={})
    work(profiler, 0)
    options = ProfileOptions(output_dir=str(tmp_path / "new"), profile_id="mine", with_stack=False)
    path = profiler.start(options)
    assert path == str(tmp_path / "new" / f"mine{SUFFIX}") and not Path(path).exists()
    work(profiler, 1)
    work(profiler, 2)
    assert profiler.stop() == path
    work(profiler, 3)
    found = names(path)
    assert {"step 1", "step 2", "aten::mul"} <= found
    assert not {"step 0", "step 3"} & found
    with pytest.raises(InvalidRequest, match="no profile runs"):
        profiler.stop()


def test_it_ends_by_itself_and_is_named_once(tmp_path: Path) -> None:
    profiler = StepProfiler(has_gpu=False, environment={"TOKENSPEED_PROFILER_DIR": str(tmp_path)})
    path = profiler.start(ProfileOptions(num_steps=2, with_stack=False))
    for step_id in range(4):
        work(profiler, step_id)
    assert Path(path).parent == tmp_path
    assert {name for name in names(path) if name.startswith("step ")} == {"step 0", "step 1"}
    assert profiler.stop() == path
    with pytest.raises(InvalidRequest, match="no profile runs"):
        profiler.stop()


def test_a_trace_without_steps_says_so(tmp_path: Path) -> None:
    profiler = StepProfiler(has_gpu=False, environment={})
    path = profiler.start(ProfileOptions(output_dir=str(tmp_path), with_stack=False))
    with pytest.raises(InvalidRequest, match=f"no step ran between start and stop, so {path} holds none"):
        profiler.stop()
    assert not {name for name in names(path) if name.startswith("step ")}
    with pytest.raises(InvalidRequest, match="no profile runs"):
        profiler.stop()
    path = profiler.start(ProfileOptions(output_dir=str(tmp_path), profile_id="closed", with_stack=False))
    profiler.close()
    assert Path(path).exists()


def test_shapes_and_stacks_are_recorded_when_asked(tmp_path: Path) -> None:
    held = {}
    for stack, shapes in ((True, False), (False, True)):
        profiler = StepProfiler(has_gpu=False, environment={"TOKENSPEED_PROFILE_WITH_STACK": "0" if stack else "1"})
        options = ProfileOptions(
            output_dir=str(tmp_path), profile_id=str(stack), with_stack=stack, record_shapes=shapes
        )
        profiler.start(options)
        work(profiler, 0)
        found = events(profiler.stop())
        held[stack] = (
            any(event.get("cat") == "python_function" for event in found),
            any("Input Dims" in event.get("args", {}) for event in found),
        )
    assert held == {True: (True, False), False: (False, True)}


def test_stacks_by_environment(tmp_path: Path) -> None:
    for value, expected in (("0", False), ("1", True)):
        profiler = StepProfiler(has_gpu=False, environment={"TOKENSPEED_PROFILE_WITH_STACK": value})
        profiler.start(ProfileOptions(output_dir=str(tmp_path), profile_id=value))
        work(profiler, 0)
        assert any(event.get("cat") == "python_function" for event in events(profiler.stop())) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ProfileOptions(activities=("GPU",)), "activities holds GPU, but the model runs on a CPU"),
        (ProfileOptions(profile_id="../x"), r"profile_id is '../x'"),
        (ProfileOptions(output_dir="/proc/nowhere"), "/proc/nowhere.*cannot be made"),
        (ProfileOptions(output_dir="a\0b"), "cannot be made"),
    ],
)
def test_refused_with_the_reason(options: ProfileOptions, words: str) -> None:
    profiler = StepProfiler(has_gpu=False, environment={})
    with pytest.raises(InvalidRequest, match=words):
        profiler.start(options)
    with pytest.raises(InvalidRequest, match="no profile runs"):
        profiler.stop()


def test_one_at_a_time_and_no_file_twice(tmp_path: Path) -> None:
    profiler = StepProfiler(has_gpu=False, environment={})
    options = ProfileOptions(output_dir=str(tmp_path), profile_id="x", with_stack=False)
    path = profiler.start(options)
    with pytest.raises(InvalidRequest, match=r"a profile runs already, into .*x-rank0"):
        profiler.start(ProfileOptions())
    profiler.close()
    assert Path(path).exists()
    with pytest.raises(InvalidRequest, match="is there already; give another profile_id"):
        profiler.start(options)


def test_a_runner_profiles_its_steps(tmp_path: Path) -> None:
    runner, _ = sum_runner()
    plans = Plans()
    first = plans.step([plans.admit(0, [1, 2, 3])], [plans.row(0, 3)])
    second = plans.step([], [plans.decode(0)])
    third = plans.step([], [plans.decode(0)])
    try:
        runner.execute(first)
        options = ProfileOptions(output_dir=str(tmp_path), with_stack=False)
        path = runner.start_profile(options).result(60)
        runner.execute(second)
        assert runner.stop_profile().result(60) == path
        assert runner.execute(third).result(60).rows[0].token_ids
        with pytest.raises(InvalidRequest):
            runner.stop_profile().result(60)
    finally:
        runner.close()
    found = names(path)
    assert f"step {second.step_id}" in found and "aten::cumsum" in found
    assert not {f"step {first.step_id}", f"step {third.step_id}"} & found
