"""The GPU runner's own logic: with graphs of decodes and prompts and without, the same plans give the same tokens.

With a GPU this is the runner as it is; without, `cuda_support` stands for the GPU.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_support import (
    BOTH_WAYS,
    GREEDY,
    LENGTH,
    LLAMA,
    NUM_PAGES,
    ON_GPU,
    SLOTS,
    InTurn,
    Recording,
    opened,
    recording_fixture,  # noqa: F401
    run,
)
from runner_support import PAGE_SIZE, Plans, as_columns, with_windows

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, SteadyResults, SteadyRows, StepPlan
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.launched_step import LaunchedStep
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.warm_up import warm_up_plans


def random_plans(seed: int, num_groups: int = 1) -> list[StepPlan]:
    """Prompts that arrive while others decode, in chunks, some asking for logprobs or prompt logprobs."""
    rng = random.Random(seed)
    plans = Plans(NUM_PAGES, num_groups=num_groups)
    wishes = [
        GREEDY,
        SamplingParams(temperature=0.7, top_p=0.9, seed=5),
        SamplingParams(temperature=0.0, logprobs=2, seed=0),
    ]
    prompts: dict[int, int] = {}
    steps = []
    started: set[int] = set()
    for _ in range(14):
        admissions, rows = [], [plans.decode(slot) for slot in sorted(started)]
        for slot in range(SLOTS):
            if slot not in prompts and rng.random() < 0.4:
                length = rng.randint(1, 20)
                sampling = rng.choice(wishes)
                if rng.random() < 0.15:
                    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, seed=0)
                admissions.append(plans.admit(slot, [rng.randrange(LLAMA.vocab_size) for _ in range(length)], sampling))
                prompts[slot] = length
        for slot, left in list(prompts.items()):
            if slot in started or rng.random() < 0.3:
                continue
            chunk = rng.randint(1, left)
            prompts[slot] -= chunk
            rows.append(plans.row(slot, chunk, samples=prompts[slot] == 0))
            if prompts[slot] == 0:
                started.add(slot)
        if rows:
            steps.append(plans.step(admissions, rows))
        else:
            for admission in admissions:  # an admission travels with a step
                del prompts[admission.slot]
    return steps


def tokens(results: list[list[RowResult]]) -> list[list[tuple[int, list[int], str | None]]]:
    return [[(row.slot, row.token_ids, row.error) for row in rows] for rows in results]


@pytest.mark.parametrize("seed", range(8))
def test_graphs_change_nothing(seed: int, recording: Recording) -> None:
    check_graphs(random_plans(seed), recording, LLAMA)


@pytest.mark.parametrize("seed", range(4))
def test_graphs_change_nothing_with_two_cache_groups(seed: int, recording: Recording) -> None:
    check_graphs(random_plans(seed, num_groups=2), recording, with_windows())


def check_graphs(plans: list[StepPlan], recording: Recording, config: ModelConfig) -> None:
    eager, report = run(plans, GraphPlan(), recording, config)
    assert [line.partition(":")[2] for line in report] == [
        " none, decode steps run eagerly",
        " none, prompts run eagerly",
    ]
    graphs = GraphPlan(
        sizes=(1, 2, 4),
        prefill_sizes=(4, 16),
        warm_up=tuple(warm_up_plans(SLOTS, LENGTH, 20, PAGE_SIZE, len(plans[0].rows[0].new_pages))),
    )
    recorded, report = run(plans, graphs, recording, config)
    assert tokens(recorded) == tokens(eager)
    assert [row.prompt_logprobs != [] for rows in recorded for row in rows] == [
        row.prompt_logprobs != [] for rows in eager for row in rows
    ]
    assert report == [
        "decode graphs: 3 sizes up to 4 rows",
        "prefill graphs: 2 sizes up to 16 tokens of at most 8 requests",
    ]
    assert ON_GPU or min(recording.num_replays[kind.__name__] for kind in (DecodeGraphs, PrefillGraphs)) > 0


def test_a_backend_that_cannot_be_recorded(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedAttentionBackend, "can_record", False)
    plans = random_plans(0)
    _, report = run(plans, GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16)), recording)
    assert report == [
        "decode graphs: none, decode steps run eagerly (paged attention cannot be recorded)",
        "prefill graphs: none, prompts run eagerly (paged attention cannot be recorded)",
    ]
    assert not recording.num_replays


def long_decodes(num_groups: int, wishes: SamplingParams = GREEDY) -> list[StepPlan]:
    """Sets of decodes that go on for a while: two slots, then three, then one again."""
    made = Plans(NUM_PAGES, num_groups=num_groups)
    steps: list[StepPlan] = []
    for decoding, new in (([], [0, 1]), ([0, 1], [2]), ([2], [])):
        admissions = [made.admit(slot, [5 + slot, 9, 2], wishes if slot == 1 else GREEDY) for slot in new]
        if new:
            steps.append(made.step(admissions, [*map(made.decode, decoding), *(made.row(slot, 3) for slot in new)]))
        steps += [made.step([], [made.decode(slot) for slot in [*decoding, *new]]) for _ in range(11)]
    return steps


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4), (2,)])
@pytest.mark.parametrize(
    "wishes",
    [
        GREEDY,
        SamplingParams(temperature=0.0, logprobs=2, seed=0),
        SamplingParams(temperature=0.9, top_k=20, frequency_penalty=0.5, seed=3),
    ],
    ids=["greedy", "logprobs", "penalties"],
)
def test_rows_as_columns_change_nothing(
    wishes: SamplingParams, sizes: tuple[int, ...], num_groups: int, recording: Recording
) -> None:
    config = with_windows() if num_groups > 1 else LLAMA
    plans = long_decodes(num_groups, wishes)
    columns = as_columns(plans)
    assert sum(isinstance(plan.rows, SteadyRows) for plan in columns) == 10 * 3
    expected, _ = run(plans, GraphPlan(sizes=sizes), recording, config)
    with opened(GraphPlan(sizes=sizes), recording, config) as runner:
        results = [pending.result().rows for pending in [runner.execute(plan) for plan in columns]]
    assert [list(rows) for rows in results] == expected
    as_rows = [place for place, plan in enumerate(plans) if wishes.logprobs is not None and len(plan.rows) > 1]
    for place, (plan, rows) in enumerate(zip(columns, results, strict=True)):
        assert isinstance(rows, SteadyResults) == (isinstance(plan.rows, SteadyRows) and place not in as_rows), place


def test_a_steady_row_that_fails_is_told_alone(recording: Recording) -> None:
    plans = long_decodes(1)[:6]
    columns = as_columns(plans)
    with opened(GraphPlan(sizes=(2,)), recording) as runner:
        for plan in columns[:3]:
            runner.execute(plan).result()
        pending = runner.execute(columns[3])
        assert isinstance(pending, LaunchedStep)
        pending.wait()
        pending._parts[0][1].token_ids[1] = -1
        rows = list(pending.result().rows)
    assert [(len(row.token_ids), row.error is None) for row in rows] == [(1, True), (0, False)]


CONSTRAINED = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    "with logprobs": SamplingParams(temperature=0.0, logprobs=2, seed=0),
    "with penalties": SamplingParams(temperature=0.9, top_k=20, frequency_penalty=0.5, logprobs=1, seed=3),
}


@BOTH_WAYS
@pytest.mark.parametrize("how", CONSTRAINED)
def test_constrained_rows_follow_and_others_do_not_notice(how: str, graphs: GraphPlan, recording: Recording) -> None:
    """Slot 1 has a grammar, slots 0 and 2 have none; slot 2 arrives late, so that steps are mixed."""

    def plans(grammar: GrammarSpec | None) -> list[StepPlan]:
        made = Plans(NUM_PAGES)
        prompts = {0: [5, 9, 2], 1: [7, 7, 1, 4], 2: [3] * 6}
        first = [
            made.admit(0, prompts[0], GREEDY),
            replace(made.admit(1, prompts[1], CONSTRAINED[how]), grammar=grammar),
        ]
        steps = [made.step(first, [made.row(0, 3, samples=True), made.row(1, 4, samples=True)])]
        steps += [made.step([], [made.decode(0), made.decode(1)]) for _ in range(4)]
        late = made.admit(2, prompts[2], CONSTRAINED["drawn"])
        steps.append(made.step([late], [made.decode(0), made.decode(1), made.row(2, 6, samples=True)]))
        steps += [made.step([], [made.decode(slot) for slot in range(3)]) for _ in range(4)]
        return steps

    spec = GrammarSpec(kind="regex", text="")
    free, _ = run(plans(None), graphs, recording)
    held, _ = run(plans(spec), graphs, recording, grammars=InTurn())
    ours = [row.token_ids[0] % 3 for rows in held for row in rows if row.slot == 1]
    assert ours == [place % 3 for place in range(10)]
    without = [[row.token_ids[0] % 3 for row in rows if row.slot == 1] for rows in free]
    assert without != [[place % 3] for place in range(10)], "the model does so anyway"
    for slot in (0, 2):
        theirs = [[row.token_ids for row in rows if row.slot == slot] for rows in held]
        assert theirs == [[row.token_ids for row in rows if row.slot == slot] for rows in free]


@BOTH_WAYS
def test_a_grammar_reads_its_token_however_late(graphs: GraphPlan, recording: Recording) -> None:
    """Slot 1 rests after each of its tokens, for up to four steps. Two later the buffer that its token came in is
    another step's, whose first token is not what its grammar allows."""
    made = Plans(NUM_PAGES)
    spec = GrammarSpec(kind="regex", text="")
    first = [made.admit(0, [5, 9, 2], GREEDY), replace(made.admit(1, [7, 7, 1, 4], GREEDY), grammar=spec)]
    first.append(made.admit(2, [3, 8], SamplingParams(temperature=0.0, logit_bias={8: 100.0}, seed=0)))
    steps = [made.step(first, [made.row(slot, count, samples=True) for slot, count in ((1, 4), (0, 3), (2, 2))])]
    for rest in (0, 1, 2, 3, 4, 2, 3):
        steps += [made.step([], [made.decode(2), made.decode(0)]) for _ in range(rest)]
        steps.append(made.step([], [made.decode(1), made.decode(0)]))
    results, _ = run(steps, graphs, recording, grammars=InTurn())
    mine = [row for rows in results for row in rows if row.slot == 1]
    assert [row.error for row in mine] == [None] * 8
    assert [row.token_ids[0] % 3 for row in mine] == [place % 3 for place in range(8)]


def test_a_grammar_that_gives_up_ends_its_own_row(recording: Recording) -> None:
    made = Plans(NUM_PAGES)
    spec = GrammarSpec(kind="regex", text="1")
    first = [made.admit(0, [5, 9], GREEDY), replace(made.admit(1, [7, 1], GREEDY), grammar=spec)]
    steps = [made.step(first, [made.row(0, 2, samples=True), made.row(1, 2, samples=True)])]
    steps += [made.step([], [made.decode(0), made.decode(1)]) for _ in range(3)]
    results, _ = run(steps, GraphPlan(sizes=(1, 2, 4)), recording, grammars=InTurn())
    faults = [[row.error for row in rows if row.slot == 1] for rows in results]
    assert faults[:2] == [[None], [None]]
    assert faults[2:] == [["the grammar cannot be followed: stuck"]] * 2
    assert all(row.error is None and len(row.token_ids) == 1 for rows in results for row in rows if row.slot == 0)


def test_a_launch_that_fails_fails_its_own_result(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_plans(0)[:2]
    (expected,), _ = run([first], GraphPlan(), recording)
    with opened(GraphPlan(), recording) as runner:
        before = runner.execute(first)

        def fail(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(runner, "_launch", fail)
        after = runner.execute(second)
        assert tokens([before.result().rows]) == tokens([expected])
        with pytest.raises(RuntimeError, match="the device is gone"):
            after.result()


@BOTH_WAYS
def test_what_is_left_of_a_failed_launch_is_waited_for(
    graphs: GraphPlan, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies from pinned memory were queued already; the next step with those buffers filled them under the
    copies' feet, because there was no step whose result to wait for."""
    plan = next(plan for plan in random_plans(0) if any(row.samples for row in plan.rows))
    waits: list[str] = []

    def fail(*_: Any) -> None:
        raise ValueError("after the copies")

    with opened(graphs, recording) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_stream", SimpleNamespace(synchronize=lambda: waits.append("waited")))
            patch.setattr(runner._drawing, "finish", fail)
            failed = runner.execute(plan)
            assert waits == ["waited"]
        with pytest.raises(ValueError, match="after the copies"):
            failed.result()


def test_the_thread_is_as_it_was_once_a_runner_is_closed(recording: Recording) -> None:
    with opened(GraphPlan(), recording):
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    if ON_GPU:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def _full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 is full")


def test_a_step_without_memory_names_bytes_and_flags(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its kind: what filled the GPU may have been another process."""
    plan, after = random_plans(0)[:2]
    with opened(GraphPlan(), recording) as runner:
        runner.execute(plan).result()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
        monkeypatch.setattr(runner, "_launch", _full)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            runner.execute(after).result()
    for part in ("running a step", "3.00 GiB needed", "1.00 GiB of 80.00 GiB free", "--gpu-memory-utilization"):
        assert part in str(raised.value), str(raised.value)
    assert "--max-num-seqs" in str(raised.value)


@pytest.mark.parametrize("where", ["_record", "_launch"])
def test_recording_without_memory_names_bytes_and_flags(
    where: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
    monkeypatch.setattr(CudaModelRunner, where, _full)
    warm_up = tuple(random_plans(0)[:1])
    with pytest.raises(ConfigError) as raised, opened(GraphPlan((1, 2), warm_up=warm_up), recording):
        pass
    for part in ("recording steps", "1.00 GiB of 80.00 GiB free", "--max-cudagraph-capture-size"):
        assert part in str(raised.value), str(raised.value)
    needed = re.search(r"at least (3\.\d\d) GiB needed", str(raised.value))  # what had been recorded is counted in
    assert needed is not None, str(raised.value)
    assert "--enforce-eager" in str(raised.value)
