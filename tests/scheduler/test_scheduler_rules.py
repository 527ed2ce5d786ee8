"""The scheduler's rules of choosing: budget, order, chunks, overlap, memory; and that they change no token."""

from __future__ import annotations

import pytest
from scheduler_tools import answer, request, scheduler_of, shape
from simulated_device import EOS
from simulated_engine import SimulatedEngine

from tokenspeed.protocol.messages import SequenceOutput
from tokenspeed.protocol.step import RowResult, StepPlan
from tokenspeed.scheduler.scheduler import Scheduler

# -- budget and order ------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_chunked_and_never_delays_a_decode() -> None:
    engine = SimulatedEngine(num_pages=32, budget=8, overlap=False)
    engine.add(request("a", 2, max_tokens=10))
    assert shape(engine.turn()) == [(0, 2, False)]
    engine.add(request("b", 20, first=3))
    assert shape(engine.turn()) == [(2, 1, True), (0, 7, False)]
    assert shape(engine.turn()) == [(3, 1, True), (7, 7, False)]
    assert shape(engine.turn()) == [(4, 1, True), (14, 6, False)]
    assert shape(engine.turn()) == [(5, 1, True), (20, 1, True)]
    engine.run()


def test_budget_left_by_one_prompt_goes_to_the_next() -> None:
    engine = SimulatedEngine(num_pages=32, budget=8)
    engine.add(request("a", 5))
    engine.add(request("b", 9, first=2))
    assert shape(engine.turn()) == [(0, 5, False), (0, 3, False)]
    engine.run()


@pytest.mark.parametrize(("policy", "order"), [("fifo", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])])
def test_order_of_admission(policy: str, order: list[str]) -> None:
    engine = SimulatedEngine(max_num_seqs=1, policy=policy, overlap=False)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -1)):
        engine.add(request(name, priority=priority))
    admitted = []
    while engine.scheduler.has_work:
        plan = engine.turn()
        admitted += [admission.request_id for admission in plan.admissions] if plan else []
    assert admitted == order


def test_steady_decode_plans_carry_no_pages_but_the_new_ones() -> None:
    engine = SimulatedEngine(num_pages=8, page_size=4, overlap=False)
    engine.add(request("a", 4, max_tokens=9))
    pages = []
    while engine.scheduler.has_work:
        plan = engine.turn()
        pages += [len(row.new_pages[0]) for row in plan.rows] if plan else []
    assert pages == [0, 1, 0, 0, 0, 1, 0, 0, 0]  # the admission brought the prompt's page


def test_an_ending_by_length_is_foreseen_by_the_overlapped_loop() -> None:
    """No row is spent on a sequence whose pending token is its last."""
    plain, overlapped = SimulatedEngine(overlap=False), SimulatedEngine(overlap=True)
    for engine in (plain, overlapped):
        engine.add(request("a", 3, max_tokens=5))
        engine.run()
    assert plain.device.num_tokens == overlapped.device.num_tokens == 3 + 4


# -- overlap: what is found late --------------------------------------------------------------------------------------


def test_a_stop_found_late_drops_the_row_in_flight_once() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", ignore_eos=False))
    first, second = scheduler.plan(), scheduler.plan()
    outputs = scheduler.apply(answer(first, EOS))
    assert [(o.finish_reason, o.stop_token_id, o.token_ids) for o in outputs] == [("stop", EOS, [EOS])]
    scheduler.check()
    assert scheduler.stats().num_pages_used == 0, "pages are free at once"
    assert scheduler.apply(answer(second)) == []
    assert not scheduler.has_work


def test_slot_and_pages_of_a_late_ending_serve_the_next_plan() -> None:
    scheduler = scheduler_of(num_pages=2, slots=1)
    scheduler.add(request("a", ignore_eos=False))
    scheduler.add(request("b", first=2))
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.apply(answer(first, EOS))
    third = scheduler.plan()
    assert third is not None and [a.request_id for a in third.admissions] == ["b"]
    assert scheduler.apply(answer(second)) == []
    assert [o.request_id for o in scheduler.apply(answer(third))] == ["b"]


def preempted_in_flight() -> tuple[Scheduler, list[SequenceOutput], StepPlan]:
    """a and b share 5 pages; in the plan that preempts b, b's newest token is still in flight."""
    scheduler = scheduler_of(num_pages=5, slots=2)
    scheduler.add(request("a", 7, max_tokens=12))
    scheduler.add(request("b", 7, first=2, max_tokens=12))
    outputs: list[SequenceOutput] = []
    last = scheduler.plan()
    while True:
        plan = scheduler.plan()
        assert plan is not None and last is not None
        if scheduler.stats().num_preemptions:
            assert [row.slot for row in plan.rows] == [last.rows[0].slot]
            outputs += scheduler.apply(answer(last))
            return scheduler, outputs, plan
        outputs += scheduler.apply(answer(last))
        last = plan


def test_the_token_that_arrives_after_a_preemption_is_kept() -> None:
    scheduler, outputs, plan = preempted_in_flight()
    said = [token_id for o in outputs if o.request_id == "b" for token_id in o.token_ids]
    while True:
        following = scheduler.plan()
        outputs += scheduler.apply(answer(plan))
        if following is None:
            following = scheduler.plan()
        assert following is not None
        back = [a for a in following.admissions if a.request_id == "b"]
        if back:
            assert back[0].token_ids == request("b", 7, first=2).prompt_token_ids + said
            assert back[0].prompt_len == 7
            return
        plan = following


def test_a_preempted_sequence_can_end_while_it_waits() -> None:
    scheduler = scheduler_of(num_pages=5, slots=2)
    scheduler.add(request("a", 7, max_tokens=12))
    scheduler.add(request("b", 7, first=2, max_tokens=12, ignore_eos=False))
    last = scheduler.plan()
    while True:
        plan = scheduler.plan()
        assert last is not None
        if scheduler.stats().num_preemptions:
            result = answer(last)
            result.rows[1] = RowResult(last.rows[1].slot, [EOS])
            outputs = scheduler.apply(result)
            assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", None), ("b", "stop")]
            scheduler.check()
            assert scheduler.num_waiting == 0
            return
        scheduler.apply(answer(last))
        last = plan


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_nobody_is_lost() -> None:
    engine = SimulatedEngine(num_pages=9, page_size=4, budget=64, max_model_len=36, prefix_caching=False)
    for number in range(4):
        engine.add(request(f"r{number}", 5, first=number, max_tokens=20))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    assert all(engine.finish(f"r{number}") == "length" for number in range(4))


def test_under_priority_the_least_important_gives_way() -> None:
    engine = SimulatedEngine(num_pages=6, page_size=4, policy="priority", max_model_len=24, prefix_caching=False)
    engine.add(request("unimportant", 4, priority=9, max_tokens=16))
    engine.turn()
    engine.add(request("important", 4, first=3, priority=-9, max_tokens=16))
    ended: list[str] = []
    while engine.scheduler.has_work:
        engine.turn()
        ended += [name for name in engine.requests if engine.finish(name) and name not in ended]
    assert engine.scheduler.stats().num_preemptions > 0
    assert ended == ["important", "unimportant"], "the later but more important one was not held up"


def test_thrashing_is_bounded() -> None:
    """Sixteen sequences in a pool for two: without a reserve at admission, each would come back to be thrown out."""
    engine = SimulatedEngine(
        num_pages=16, page_size=4, max_num_seqs=16, budget=64, max_model_len=40, prefix_caching=False
    )
    for number in range(16):
        engine.add(request(f"r{number}", 8, first=number % 7, max_tokens=24))
    engine.run()
    assert engine.scheduler.stats().num_preemptions <= 16, "25 without the reserve"
    assert engine.device.num_tokens < 1.5 * 16 * (8 + 24), "half of the work was done twice"


def test_a_single_sequence_may_fill_the_whole_pool() -> None:
    engine = SimulatedEngine(num_pages=3, page_size=4, max_model_len=1000, budget=5)
    engine.add(request("a", 11, max_tokens=900))
    engine.run()
    assert engine.finish("a") == "length" and len(engine.tokens("a")) == 1
    engine.add(request("b", 3, first=2, max_tokens=900))
    engine.run()
    assert engine.finish("b") == "length" and len(engine.tokens("b")) == 9


@pytest.mark.parametrize(("prompt_len", "names"), [(12, ("12", "12")), (50, ("50", "40")), (0, ("empty", "1"))])
def test_what_can_never_run_is_refused_with_both_numbers(prompt_len: int, names: tuple[str, str]) -> None:
    engine = SimulatedEngine(num_pages=3, page_size=4, max_model_len=40)
    engine.add(request("a", prompt_len, n=2))
    for index in range(2):
        (output,) = engine.news["a", index]
        assert output.finish_reason == "error" and output.error is not None
        assert all(name in output.error for name in names)
    assert not engine.scheduler.has_work


# -- equivalence and cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["budget", "overlap", "prefix_caching", "num_pages", "max_num_seqs"])
def test_greedy_tokens_do_not_depend_on_how_they_are_scheduled(changed: str) -> None:
    base = {"budget": 64, "overlap": True, "prefix_caching": True, "num_pages": 64, "max_num_seqs": 8}
    other = {"budget": 1, "overlap": False, "prefix_caching": False, "num_pages": 12, "max_num_seqs": 1}
    said = []
    for options in (base, {**base, changed: other[changed]}):
        engine = SimulatedEngine(max_model_len=40, **options)  # type: ignore[arg-type]
        for number in range(6):
            engine.add(request(f"r{number}", 3 + 5 * number, first=number % 2, max_tokens=12, n=1 + number % 2))
        engine.run()
        said.append({key: engine.tokens(*key) for key in engine.news})
    assert said[0] == said[1]


def test_the_host_work_of_a_decode_step_does_not_grow_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what could be linear in the tokens: pages handed out and pages named, over a long decode."""
    scheduler = scheduler_of(num_pages=600, page_size=4, max_model_len=2000, slots=1)
    named = 0
    manager = scheduler._cache
    pool = manager._pool
    add = pool.index.add

    def counting_add(group: int, name: bytes, page: int) -> None:
        nonlocal named
        named += 1
        add(group, name, page)

    monkeypatch.setattr(pool.index, "add", counting_add)
    scheduler.add(request("a", 4, max_tokens=1900))
    handed = 0
    plan = scheduler.plan()
    while plan is not None:
        handed += sum(len(pages) for row in plan.rows for pages in row.new_pages)
        assert len(plan.rows) == 1 and (plan.rows[0].start < 4 or not plan.admissions)
        scheduler.apply(answer(plan))
        plan = scheduler.plan()
    assert handed == (4 + 1900 - 1 - 4 + 3) // 4, "every page is handed out once, one at a time"
    assert named == (4 + 1900 - 1) // 4, "every full page is named once"
