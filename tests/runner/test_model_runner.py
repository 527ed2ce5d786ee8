"""Plans to results, over a model whose answers are known by heart: the sum of what stands before."""

from __future__ import annotations

import math

import pytest
import torch
from runner_support import GREEDY, VOCAB, LateTape, Plans, SumModel, next_sums, sum_runner

from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, StepPlan, StepResult, TokenLogprobs
from tokenspeed.runner.model_runner import ModelRunner, prompt_rows

POISON = VOCAB - 1
RECORDERS = {"plain": None, "recorded": 8, "recorded-to-2": 2, "eager": 8}


@pytest.fixture(params=list(RECORDERS))
def made(request: pytest.FixtureRequest):
    """A runner of each kind: without recorder, with one, with one that gives up above 2 rows, with one not used."""
    limit = RECORDERS[request.param]
    recorder = None if limit is None else LateTape(limit)
    runner, model = sum_runner(recorder=recorder, enforce_eager=request.param == "eager")
    runner.capture()
    model.forward_sizes.clear()
    yield runner, model
    runner.close()
    if recorder is not None:
        assert (recorder.num_replays > 0) == (request.param != "eager")


def do(runner: ModelRunner, plan: StepPlan) -> StepResult:
    result = runner.execute(plan).result(timeout=30)
    assert result.step_id == plan.step_id
    assert [row.slot for row in result.rows] == [row.slot for row in plan.rows]
    return result


def test_mixed_steps(made: tuple[ModelRunner, SumModel]) -> None:
    """Decodes, a prompt in chunks, a whole prompt and a one-token prompt share steps; pages come one by one."""
    runner, _ = made
    plans = Plans(order=-1)
    prompts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8, 9, 10], 2: [11], 3: [12, 13, 14, 15]}
    said: dict[int, list[int]] = {slot: [] for slot in prompts}

    def step(admissions: list[Admission], rows: list[Row]) -> None:
        for row in do(runner, plans.step(admissions, rows)).rows:
            assert row.error is None
            said[row.slot] += row.token_ids

    step([plans.admit(slot, prompts[slot]) for slot in (0,)], [plans.row(0, 3)])
    step([plans.admit(1, prompts[1])], [plans.decode(0), plans.row(1, 2, samples=False)])
    step([plans.admit(2, prompts[2])], [plans.decode(0), plans.row(1, 3, samples=False), plans.row(2, 1)])
    step([plans.admit(3, prompts[3])], [plans.decode(2), plans.decode(0), plans.row(1, 2), plans.row(3, 4)])
    for _ in range(5):
        step([], [plans.decode(slot) for slot in (3, 1, 0, 2)])
    assert {slot: len(ids) for slot, ids in said.items()} == {0: 9, 1: 6, 2: 7, 3: 6}
    for slot, ids in said.items():
        assert ids == next_sums(prompts[slot], len(ids))


def test_decode_rows_are_computed_apart_where_they_have_kernels_of_their_own() -> None:
    """Recorded or not: the rows of a mixed step meet the same kernels (regression: an eager engine merged them)."""
    sizes = {}
    for name, (limit, eager) in {"none": (None, False), "graphs": (8, False), "eager": (8, True)}.items():
        runner, model = sum_runner(recorder=None if limit is None else LateTape(limit), enforce_eager=eager)
        runner.capture()
        plans = Plans()
        do(runner, plans.step([plans.admit(0, [1, 2, 3])], [plans.row(0, 3)]))
        model.forward_sizes.clear()
        do(runner, plans.step([plans.admit(1, [4, 5])], [plans.decode(0), plans.row(1, 2)]))
        sizes[name] = list(model.forward_sizes)
        runner.close()
    assert sizes == {"none": [3], "graphs": [1, 2], "eager": [1, 2]}


def test_prompts_in_bfloat16_are_filled_up_to_few_sizes() -> None:
    """Regression: oneDNN kept a program for every number of prompt rows, and the engine grew by hundreds of MB."""
    runner, model = sum_runner(dtype=torch.bfloat16, max_model_len=30, num_pages=64)
    plans = Plans(64)
    result = do(runner, plans.step([plans.admit(0, [1, 2, 3])], [plans.row(0, 3)]))
    assert [row.token_ids for row in result.rows] == [[6]]
    do(runner, plans.step([], [plans.decode(0)]))
    runner.close()
    assert model.forward_sizes == [80, 1]
    assert [prompt_rows(count) for count in (1, 65, 80, 81, 300, 512, 513, 8000)] == [
        *(80, 80, 80, 96, 320, 512, 640, 8064),
    ]


def test_only_prompt_chunks_sample_nothing(made: tuple[ModelRunner, SumModel]) -> None:
    runner, _ = made
    plans = Plans()
    rows = [plans.row(slot, 2, samples=False) for slot in _admitted(runner, plans, {0: [1, 2, 3], 1: [4, 5, 6]})]
    result = do(runner, plans.step([], rows))
    assert [(row.token_ids, row.logprobs, row.error) for row in result.rows] == [([], [], None)] * 2
    rest = do(runner, plans.step([], [plans.row(0, 1), plans.row(1, 1)]))
    assert [row.token_ids for row in rest.rows] == [[6], [15]]
    do(runner, plans.step([], [plans.decode(0)]))  # the recorded kinds replay once


def _admitted(runner: ModelRunner, plans: Plans, prompts: dict[int, list[int]]) -> list[int]:
    """Admits with a first step over a slot of its own, since a plan has at least one row."""
    admissions = [plans.admit(slot, prompt) for slot, prompt in prompts.items()]
    admissions.append(plans.admit(5, [1]))
    do(runner, plans.step(admissions, [plans.row(5, 1)]))
    return list(prompts)


def test_a_poisoned_row_fails_alone(made: tuple[ModelRunner, SumModel]) -> None:
    """In its prompt's step, and in a plan that was made before its failure was known."""
    runner, _ = made
    plans = Plans()
    prompts = [[1, 2, 3], [4, POISON, 5], [6, 7, 8]]
    admissions = [plans.admit(slot, prompt) for slot, prompt in enumerate(prompts)]
    first = plans.step(admissions, [plans.row(slot, 3) for slot in range(3)])
    second = plans.step([], [plans.decode(slot) for slot in range(3)])
    futures = [runner.execute(first), runner.execute(second)]
    results = [future.result(timeout=30) for future in futures]
    for step, result in enumerate(results):
        a, poisoned, c = result.rows
        assert (a.token_ids, c.token_ids) == ([next_sums([1, 2, 3], 2)[step]], [next_sums([6, 7, 8], 2)[step]])
        assert poisoned.token_ids == [] and poisoned.error == "NaN logits"
        assert a.error is None and c.error is None
    again = plans.step([plans.admit(1, [9, 10])], [plans.decode(0), plans.row(1, 2)])
    healed = do(runner, again).rows[1]
    assert (healed.token_ids, healed.error) == ([19], None)


def test_results_come_in_order_and_plans_may_be_queued(made: tuple[ModelRunner, SumModel]) -> None:
    """The tokens of queued decodes were never on the host when the plans were made."""
    runner, _ = made
    plans = Plans()
    queued = [plans.step([plans.admit(0, [3, 4])], [plans.row(0, 2)])]
    queued += [plans.step([], [plans.decode(0)]) for _ in range(9)]
    order: list[int] = []
    futures = [runner.execute(plan) for plan in queued]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.result().step_id))
    results = [future.result(timeout=30) for future in futures]
    assert [result.rows[0].token_ids[0] for result in results] == next_sums([3, 4], 10)
    runner.execute(plans.step([], [plans.decode(0)])).result(timeout=30)  # callbacks of the others have run by now
    assert order == sorted(order)


def test_a_slot_is_handed_on_within_the_next_plan(made: tuple[ModelRunner, SumModel]) -> None:
    """Its pages too: what the old sequence's late row writes is overwritten before it is read."""
    runner, _ = made
    plans = Plans()
    first = plans.step([plans.admit(0, [1, 2, 3], SamplingParams(seed=1, temperature=1.5))], [plans.row(0, 3)])
    late = plans.step([], [plans.decode(0)])
    pages = first.admissions[0].pages
    other = plans.admit(0, [7, 8, 9])
    other = type(other)(0, "other", 0, [7, 8, 9], 3, pages, GREEDY)
    following = plans.step([other], [plans.row(0, 3)])
    futures = [runner.execute(plan) for plan in (first, late, following)]
    assert futures[2].result(timeout=30).rows[0].token_ids == [24]


def test_readmission_after_a_preemption_computes_prompt_and_output(made: tuple[ModelRunner, SumModel]) -> None:
    runner, _ = made
    plans = Plans()
    do(runner, plans.step([plans.admit(0, [1, 2])], [plans.row(0, 2)]))
    do(runner, plans.step([], [plans.decode(0)]))
    again = plans.admit(3, [1, 2, *next_sums([1, 2], 2)], prompt_len=2)
    result = do(runner, plans.step([again], [plans.row(3, 4)]))
    assert result.rows[0].token_ids == next_sums([1, 2], 3)[2:]


# -- logprobs --------------------------------------------------------------------------------------------------------


def known_logprob(tokens: list[int], token_id: int, num_top: int) -> tuple[float, int]:
    """Of `token_id` after `tokens` under `SumModel`: logit 5 for the sum, 0 for the others."""
    total = 5.0 if sum(tokens) % (VOCAB - 1) == token_id else 0.0
    return total - math.log(math.exp(5.0) + VOCAB - 1), 1 if total else 2


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 4, 1], [2, 6, 1]], ids=str)
def test_prompt_logprobs_across_chunks(made: tuple[ModelRunner, SumModel], chunks: list[int]) -> None:
    """One entry a prompt position but the first, from the row that computed the position before it. A neighbour that
    did not ask gets none."""
    runner, _ = made
    plans = Plans()
    prompt = [5, 5, 10, 3, 23, 46, 43, 2, 2]
    asked = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2, logprobs=1)
    admissions = [plans.admit(0, prompt, asked), plans.admit(1, [1])]
    found: list[TokenLogprobs] = []
    for number, size in enumerate(chunks):
        rows = [plans.row(0, size, samples=number == len(chunks) - 1)]
        rows = [plans.decode(1), *rows] if number else [*rows, plans.row(1, 1)]
        result = do(runner, plans.step([] if number else admissions, rows))
        mine, other = (result.rows[1], result.rows[0]) if number else result.rows
        assert other.prompt_logprobs == [] and other.logprobs == []
        start = sum(chunks[:number])
        assert len(mine.prompt_logprobs) == min(start + size + 1, len(prompt)) - start - 1
        found += mine.prompt_logprobs
        if number == len(chunks) - 1:
            (own,) = mine.logprobs
            assert own.token_id == mine.token_ids[0] == own.top_ids[0]
    assert [one.token_id for one in found] == prompt[1:]
    for position, one in enumerate(found, start=1):
        logprob, rank = known_logprob(prompt[:position], prompt[position], 2)
        assert one.logprob == pytest.approx(logprob, abs=1e-5) and one.rank == rank
        assert one.top_ids[0] == sum(prompt[:position]) % (VOCAB - 1) and len(one.top_ids) == 2
    after = do(runner, plans.step([], [plans.decode(1), plans.decode(0)])).rows[1]
    assert after.prompt_logprobs == [] and len(after.logprobs) == 1


def test_prompt_logprobs_of_a_long_prompt_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a whole prompt never exist at once."""
    monkeypatch.setattr("tokenspeed.runner.prompt_logprobs.ROWS", 3)
    runner, model = sum_runner()
    sizes: list[int] = []
    whole = model.head
    monkeypatch.setattr(model, "head", lambda hidden: sizes.append(len(hidden)) or whole(hidden))
    plans = Plans()
    prompt = list(range(1, 12))
    asked = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    result = do(runner, plans.step([plans.admit(0, prompt, asked)], [plans.row(0, 11)]))
    runner.close()
    assert [one.token_id for one in result.rows[0].prompt_logprobs] == prompt[1:]
    assert sizes == [3, 3, 3, 1, 1]


# -- starting and ending ---------------------------------------------------------------------------------------------


def test_capture_says_what_it_recorded() -> None:
    lines = {}
    for name, (limit, eager) in {
        "none": (None, False),
        "all": (8, False),
        "some": (4, False),
        "off": (8, True),
    }.items():
        recorder = None if limit is None else LateTape(limit)
        runner, _ = sum_runner(recorder=recorder, enforce_eager=eager)
        runner.capture()
        lines[name] = runner.report[-1], recorder.recorded if recorder else []
        runner.close()
    assert lines["none"] == lines["off"] == ("step graphs: none, every step runs eagerly", [])
    assert lines["all"] == ("step graphs: recorded for 1 to 6 decode rows", [1, 2, 3, 4, 5, 6])
    assert lines["some"] == ("step graphs: 4 sizes, then eager (more than 4 rows)", [1, 2, 3, 4])


def test_capture_warms_up_without_touching_a_page_that_a_request_may_get() -> None:
    runner, model = sum_runner(num_pages=12)
    assert model._kv is not None
    runner.capture()
    assert model.num_forwards >= 2
    assert model._kv.keys[:12].isnan().all() and not model._kv.keys[12].isnan().any()
    runner.close()


@pytest.mark.parametrize("max_model_len", [2, 3, 100])
def test_warming_up_fits_the_shortest_context(max_model_len: int) -> None:
    runner, _ = sum_runner(max_model_len=max_model_len, max_num_seqs=1)
    runner.capture()
    runner.close()


def test_a_failed_step_is_the_futures_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = sum_runner()

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(model, "forward", fail)
    plans = Plans()
    future = runner.execute(plans.step([plans.admit(0, [1])], [plans.row(0, 1)]))
    with pytest.raises(RuntimeError, match="the device is gone"):
        future.result(timeout=30)
    runner.close()


def test_close_finishes_what_is_queued() -> None:
    runner, _ = sum_runner()
    plans = Plans()
    queued = [plans.step([plans.admit(0, [3, 4])], [plans.row(0, 2)])]
    queued += [plans.step([], [plans.decode(0)]) for _ in range(20)]
    futures = [runner.execute(plan) for plan in queued]
    runner.close()
    assert all(future.done() for future in futures)
    assert [future.result().rows[0].token_ids[0] for future in futures] == next_sums([3, 4], 21)
