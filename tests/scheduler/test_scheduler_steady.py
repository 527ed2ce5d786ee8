"""Steady decoding: taken in steady state, left where it has to be, and never to be told from the ordinary path."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from scheduler_tools import request, scheduler_of
from simulated_device import EOS
from simulated_engine import SimulatedEngine
from test_scheduler_random import random_request, random_windows

from tokenspeed.protocol.messages import Continued, SequenceOutput
from tokenspeed.protocol.step import RowResult, SteadyResults, SteadyRows, StepPlan, StepResult
from tokenspeed.scheduler.scheduler import Scheduler
from tokenspeed.scheduler.steady import SteadyDecodes


def steady_flags(engine: SimulatedEngine) -> list[bool]:
    """Of each plan until idle, whether it came as columns."""
    flags = []
    while engine.scheduler.has_work:
        plan = engine.turn()
        if plan is not None:
            flags.append(isinstance(plan.rows, SteadyRows))
    engine.check_idle()
    return flags


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_all_steps_but_the_first_and_last_are_steady(
    overlap: bool, page_size: int, windows: tuple[int | None, ...]
) -> None:
    engine = SimulatedEngine(num_pages=256 // page_size, page_size=page_size, overlap=overlap, windows=windows)
    for name in ("a", "b"):
        engine.add(request(name, 4, max_tokens=30))
    flags = steady_flags(engine)
    # A prompt, then decodes: the first looks at every row, and so does the last where all end by length before it.
    num_slow = flags.count(False)
    assert flags[num_slow:] == [True] * (30 - num_slow), "steady once begun, until all have ended"
    assert num_slow <= 4
    news = [output for output in engine.news["a", 0] if output.finish_reason is None]
    assert len(news) == 29


def test_results_as_columns_give_news_as_columns() -> None:
    engine = SimulatedEngine(num_pages=64)
    said: list[Any] = []
    take = engine._take
    engine._take = lambda outputs: (said.append(outputs), take(outputs))  # type: ignore[method-assign,assignment,func-returns-value]
    engine.add(request("a", 4, max_tokens=30))
    engine.run()
    kinds = [isinstance(outputs, Continued) for outputs in said if len(outputs)]
    assert kinds.count(True) > 20
    assert not kinds[-1], "an ending is told in full"


def begun(num: int = 2, **limits: int) -> tuple[Scheduler, list[StepPlan]]:
    """A scheduler with two steady plans in flight, for sequences a, b, ..."""
    scheduler = scheduler_of(**limits)
    for number in range(num):
        scheduler.add(request(chr(97 + number), ignore_eos=False, max_tokens=40))
    in_flight: list[StepPlan] = []
    while len(in_flight) < 2 or not isinstance(in_flight[0].rows, SteadyRows):
        if len(in_flight) == 2:
            scheduler.apply(tokens_of(in_flight.pop(0), 5))
        plan = scheduler.plan()
        assert plan is not None
        in_flight.append(plan)
    return scheduler, in_flight


def tokens_of(plan: StepPlan, *token_ids: int) -> StepResult:
    """One token each, the last for all rows that are left; as columns where the plan is."""
    mine = [*token_ids, *[token_ids[-1]] * len(plan.rows)][: len(plan.rows)]
    if isinstance(plan.rows, SteadyRows):
        return StepResult(plan.step_id, SteadyResults(plan.rows.members, mine))
    return StepResult(plan.step_id, [RowResult(row.slot, [one]) for row, one in zip(plan.rows, mine, strict=True)])


def test_a_stop_token_in_a_steady_step_ends_its_sequence_only() -> None:
    scheduler, in_flight = begun()
    outputs = list(scheduler.apply(tokens_of(in_flight.pop(0), 5, EOS)))
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in outputs] == [
        ("a", [5], None),
        ("b", [EOS], "stop"),
    ]
    scheduler.check()
    late = list(scheduler.apply(tokens_of(in_flight.pop(0), 6)))
    assert [(o.request_id, o.token_ids) for o in late] == [("a", [6])], "b's row in flight is dropped"
    plan = scheduler.plan()
    assert plan is not None and not isinstance(plan.rows, SteadyRows)
    assert [row.slot for row in plan.rows] == [0]
    scheduler.apply(tokens_of(plan, 5))
    assert isinstance(scheduler.plan().rows, SteadyRows), "those who are left decode on as before"


def test_an_error_in_a_steady_step_ends_its_sequence_only() -> None:
    scheduler, in_flight = begun()
    plan = in_flight.pop(0)
    slots = [row.slot for row in plan.rows]
    outputs = list(
        scheduler.apply(StepResult(plan.step_id, [RowResult(slots[0], [], error="NaN"), RowResult(slots[1], [7])]))
    )
    assert [(o.request_id, o.token_ids, o.error) for o in outputs] == [("a", [], "NaN"), ("b", [7], None)]
    scheduler.check()


def test_an_abort_between_steady_steps() -> None:
    scheduler, in_flight = begun(3)
    assert [o.finish_reason for o in scheduler.abort("b")] == ["abort"]
    scheduler.check()
    for plan in in_flight:
        assert [o.request_id for o in scheduler.apply(tokens_of(plan, 5))] == ["a", "c"]
        scheduler.check()


def test_a_request_that_can_enter_ends_a_steady_state() -> None:
    scheduler, in_flight = begun(2, slots=3)
    scheduler.add(request("late", first=2))
    plan = scheduler.plan()
    assert plan is not None and [admission.request_id for admission in plan.admissions] == ["late"]
    for earlier in in_flight:
        scheduler.apply(tokens_of(earlier, 5))
    scheduler.check()


def test_requests_that_wait_for_a_slot_do_not_end_it() -> None:
    scheduler, in_flight = begun(2, slots=2)
    scheduler.add(request("late", first=2))
    scheduler.apply(tokens_of(in_flight.pop(0), 5))
    plan = scheduler.plan()
    assert plan is not None and isinstance(plan.rows, SteadyRows)
    scheduler.check()


def test_a_request_that_waits_for_memory_beside_a_free_slot_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it ended the steady state in every step, which where memory is short is for most of the time; a set
    was made for each step and thrown away. It is still asked in every step, and enters when it did."""
    num_made, make = 0, SteadyDecodes.__init__

    def counted(*args: Any) -> None:
        nonlocal num_made
        num_made += 1
        make(*args)

    monkeypatch.setattr(SteadyDecodes, "__init__", counted)
    plain, ordinary = (kind(num_pages=9, max_num_seqs=3, budget=64) for kind in (SimulatedEngine, Ordinary))
    for engine in (plain, ordinary):
        engine.add(request("a", 4, max_tokens=14))
        engine.add(request("b", 4, first=2, max_tokens=10))
        engine.add(request("late", 22, first=3, max_tokens=3))
    flags = []
    while ordinary.scheduler.has_work:
        num_waiting = plain.scheduler.num_waiting
        plan, expected = plain.turn(), ordinary.turn()
        assert (plan is None) == (expected is None)
        if plan is not None and expected is not None:
            assert (plan.admissions, list(plan.rows)) == (expected.admissions, expected.rows)
            flags.append((num_waiting, isinstance(plan.rows, SteadyRows)))
    plain.check_idle()
    assert flags.count((1, True)) >= 10 and num_made <= 4, (flags, num_made)


def test_log_probabilities_keep_the_ordinary_path() -> None:
    engine = SimulatedEngine(num_pages=64)
    wishes = request("a", 4, max_tokens=10)
    wishes.sampling = msgspec.structs.replace(wishes.sampling, logprobs=1)
    engine.add(wishes)
    engine.add(request("b", 4, max_tokens=10))
    assert True not in steady_flags(engine)


def test_a_result_of_other_rows_is_a_bug_of_the_runner() -> None:
    scheduler, in_flight = begun()
    _, others = begun()
    assert isinstance(others[0].rows, SteadyRows)
    with pytest.raises(ValueError, match="other rows"):
        scheduler.apply(StepResult(in_flight[0].step_id, SteadyResults(others[0].rows.members, [5, 5])))


# -- the two paths ---------------------------------------------------------------------------------------------------


class Ordinary(SimulatedEngine):
    """Looks at every sequence in every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scheduler._plan_steady = lambda: None  # type: ignore[method-assign]


def life_of(kind: type[SimulatedEngine], seed: str, crowded: bool) -> tuple[list[Any], list[SequenceOutput], int, int]:
    """(every plan, all news in order, steady plans, preemptions) of a random life."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4])
    num_pages = rng.randint(5, 9) if crowded else rng.randint(30, 90)
    engine = kind(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=rng.randint(1, 6),
        budget=rng.choice([3, 8, 64]),
        max_model_len=rng.randint(20, 60),
        prefix_caching=rng.random() < 0.5,
        policy=rng.choice(["fifo", "priority"]),
        depth=rng.choice([1, 2, 2, 3]),
        windows=rng.choice([(None,), random_windows(rng)]),
    )
    plans: list[Any] = []
    steady = 0
    said: list[SequenceOutput] = []
    take = engine._take

    def took(outputs: Any) -> None:
        said.extend(outputs)
        take(outputs)

    engine._take = took  # type: ignore[method-assign]
    for number in range(rng.randint(2, 12)):
        fresh = random_request(rng, f"r{number}", engine.max_len)
        fresh.sampling = msgspec.structs.replace(fresh.sampling, logprobs=rng.choice([None] * 9 + [1]))
        engine.add(fresh)
        for _ in range(rng.choice([0, 0, 2, 5, 20])):
            plans.append(engine.turn())
        if rng.random() < 0.2:
            engine.abort(f"r{rng.randint(0, number)}", rng.choice([None, 0, 1]))
    while engine.scheduler.has_work:
        plans.append(engine.turn())
    engine.check_idle()
    for place, plan in enumerate(plans):
        if plan is not None:
            steady += isinstance(plan.rows, SteadyRows)
            plans[place] = (plan.step_id, plan.admissions, list(plan.rows), plan.num_tokens)
    return plans, said, steady, engine.scheduler.stats().num_preemptions


@pytest.mark.parametrize("crowded", [False, True])
def test_both_paths_make_the_same_plans_and_news(crowded: bool) -> None:
    num_steady = num_plans = num_preemptions = 0
    for case in range(120):
        plans, said, steady, preempted = life_of(SimulatedEngine, f"{crowded} {case}", crowded)
        expected_plans, expected, none, expected_preempted = life_of(Ordinary, f"{crowded} {case}", crowded)
        assert plans == expected_plans
        assert said == expected
        assert none == 0
        assert preempted == expected_preempted
        num_steady += steady
        num_plans += len(plans)
        num_preemptions += preempted
    assert num_steady > num_plans // (20 if crowded else 8), f"{num_steady} of {num_plans} plans were steady"
    assert (num_preemptions > 50) == crowded, f"{num_preemptions} preemptions"
