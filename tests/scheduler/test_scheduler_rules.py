"""The scheduler's rules one by one: budget, order, chunks, memory, n, endings."""

from __future__ import annotations

import pytest
from simulated_device import EOS, POISON, history_of
from simulated_engine import VOCAB, SimulatedEngine

from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.protocol.messages import AddRequest, SequenceOutput
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, StepPlan, StepResult
from tokenspeed.scheduler.scheduler import Scheduler


def request(
    name: str,
    prompt_len: int = 4,
    *,
    max_tokens: int = 6,
    n: int = 1,
    priority: int = 0,
    first: int = 1,
    salt: str | None = None,
    prompt_logprobs: int | None = None,
    ignore_eos: bool = True,
) -> AddRequest:
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
    )
    prompt = [(first + i) % VOCAB for i in range(prompt_len)]
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, priority=priority, cache_salt=salt)


def shape(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(start, num_tokens, is_decode) of the rows."""
    return [] if plan is None else [(row.start, row.num_tokens, row.is_decode) for row in plan.rows]


def scheduler_of(num_pages: int = 64, page_size: int = 4, slots: int = 4, **limits: int) -> Scheduler:
    """A bare scheduler whose results the test writes itself."""
    return Scheduler(
        cache=CacheManager([GroupSpec("full", "full", page_size, 1, num_pages)], True),
        eos_token_ids=(EOS,),
        max_num_seqs=slots,
        max_num_batched_tokens=limits.get("budget", 64),
        max_model_len=limits.get("max_model_len", 64),
    )


def answer(plan: StepPlan | None, token_id: int = 5) -> StepResult:
    assert plan is not None
    return StepResult(plan.step_id, [RowResult(row.slot, [token_id] if row.samples else []) for row in plan.rows])


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


# -- prefix cache, n -------------------------------------------------------------------------------------------------


def test_a_cached_prompt_computes_only_its_last_partial_page() -> None:
    engine = SimulatedEngine(num_pages=32, budget=64, overlap=False)
    engine.add(request("a", 12))
    engine.run()
    engine.add(request("b", 12))
    assert shape(engine.turn()) == [(8, 4, False)], "a full page is left out so that a token remains to compute"
    engine.run()
    assert engine.news["b", 0][0].num_cached_tokens == 8
    assert engine.tokens("a") == engine.tokens("b")
    stats = engine.scheduler.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_prompt_tokens) == (8, 24)


def test_salts_do_not_share() -> None:
    engine = SimulatedEngine(num_pages=32, budget=64)
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        engine.add(request(name, 12, salt=salt))
        engine.run()
    assert [engine.news[name, 0][0].num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_output_pages_are_found_by_the_next_turn_of_a_conversation() -> None:
    engine = SimulatedEngine(num_pages=32, budget=64)
    engine.add(request("a", 6, max_tokens=7))
    engine.run()
    history = request("a", 6).prompt_token_ids + engine.tokens("a")
    follow_up = AddRequest(
        request_id="b", prompt_token_ids=[*history, 4, 4], sampling=SamplingParams(max_tokens=2, temperature=0.0)
    )
    engine.add(follow_up)
    engine.run()
    assert engine.news["b", 0][0].num_cached_tokens == 12


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_n_sequences_compute_the_shared_pages_of_the_prompt_once(prefix_caching: bool, overlap: bool) -> None:
    engine = SimulatedEngine(num_pages=32, budget=64, prefix_caching=prefix_caching, overlap=overlap)
    engine.add(request("a", 14, n=4, max_tokens=3))
    most_pages = 0
    while engine.scheduler.has_work:
        engine.turn()
        most_pages = max(most_pages, engine.cache.num_pages_used)
    engine.check_idle()
    assert engine.device.num_tokens == 14 + 3 * 2 + 4 * 2, "the prompt, three partial pages, two decodes each"
    assert most_pages <= 3 + 4 * 2, "three pages shared, the rest their own"
    assert [engine.news["a", index][0].num_cached_tokens for index in range(4)] == [0, 0, 0, 0]
    assert (engine.cache.num_pages_cached > 0) == prefix_caching


def test_siblings_go_on_when_the_first_is_aborted_before_the_prompt_is_done() -> None:
    engine = SimulatedEngine(num_pages=32, budget=4)
    engine.add(request("a", 14, n=3))
    engine.turn()
    engine.abort("a", 0)
    engine.run()
    assert [engine.finish("a", index) for index in range(3)] == ["abort", "length", "length"]


def test_prompt_logprobs_compute_the_prompt_even_when_cached_and_survive_preemption() -> None:
    engine = SimulatedEngine(num_pages=7, page_size=4, budget=5, max_model_len=28, policy="priority")
    engine.add(request("warm", 12, max_tokens=1))
    engine.run()
    engine.add(request("a", 16, prompt_logprobs=1, n=2, max_tokens=6))
    engine.turn()
    engine.add(request("b", 3, first=5, priority=-1, max_tokens=20))
    engine.run()  # judges that every position's entry came once
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.news["a", 0][0].num_cached_tokens == 0


def test_prompt_logprobs_are_collected_anew_after_a_preemption_in_the_prompt() -> None:
    engine = SimulatedEngine(num_pages=8, page_size=4, budget=2, max_model_len=32, overlap=False)
    engine.add(request("old", 4, first=5, max_tokens=24))
    for _ in range(3):
        engine.turn()
    engine.add(request("a", 19, prompt_logprobs=1, max_tokens=2))
    for _ in range(12):
        if not engine.scheduler.stats().num_preemptions:
            engine.turn()
    assert engine.scheduler.stats().num_preemptions == 1
    assert 0 < len(engine.scheduler._requests["a"].prompt_logprobs) < 18, "it was thrown out inside its prompt"
    engine.run()


def test_prompt_logprobs_once_delivered_are_not_asked_again_after_a_preemption() -> None:
    engine = SimulatedEngine(num_pages=7, page_size=4, budget=16, max_model_len=28, overlap=False)
    engine.add(request("old", 4, first=5, max_tokens=20))
    engine.add(request("a", 9, prompt_logprobs=1, max_tokens=12))
    asked = []
    while engine.scheduler.has_work:
        plan = engine.turn()
        if plan is not None:
            asked += [a.sampling.prompt_logprobs for a in plan.admissions if a.request_id == "a"]
    assert asked[0] == 1 and len(asked) > 1 and not any(asked[1:])
    engine.check_idle()


# -- endings ---------------------------------------------------------------------------------------------------------


def test_a_poisoned_request_fails_alone_and_leaves_no_page_to_find() -> None:
    """The prompt is computed in chunks, so its first pages are named before the error shows."""
    engine = SimulatedEngine(num_pages=32, budget=4)
    bad = request("bad", 9)
    bad.prompt_token_ids[2] = POISON
    engine.add(request("good", 9))
    engine.add(bad)
    engine.run()
    assert (engine.finish("good"), engine.finish("bad")) == ("length", "error")
    assert engine.scheduler.stats().num_nan_aborted == 1
    again = request("again", 9)
    again.prompt_token_ids[2] = POISON
    engine.add(again)
    engine.run()
    assert engine.news["again", 0][0].num_cached_tokens == 0


def test_no_stop_token_ends_a_sequence_before_min_tokens() -> None:
    scheduler = scheduler_of()
    sampling = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,))
    scheduler.add(AddRequest(request_id="a", prompt_token_ids=[1, 2], sampling=sampling))
    plan = scheduler.plan()
    assert plan is not None and set(plan.admissions[0].banned_token_ids) == {EOS, 7}
    for token_id, reason in ((EOS, None), (7, None), (7, "stop")):
        (output,) = scheduler.apply(answer(plan, token_id))
        assert output.finish_reason == reason
        plan = scheduler.plan()


def test_a_plan_does_not_change_when_its_result_is_applied() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a", 4))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(answer(plan))
    scheduler.plan()
    assert plan.admissions[0].token_ids == request("a", 4).prompt_token_ids
    assert plan.admissions[0].pages == ([0],)


def test_accepted_drafts_after_a_stop_token_are_cut() -> None:
    class Fixed:
        def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
            return [3, EOS, 3, 3][:max_drafts]

    scheduler = Scheduler(
        cache=CacheManager([GroupSpec("full", "full", 4, 1, 16)], True),
        eos_token_ids=(EOS,),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=40,
        drafter=Fixed(),
    )
    scheduler.add(request("a", max_tokens=20, ignore_eos=False))
    scheduler.apply(answer(scheduler.plan()))
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens == 5 and plan.rows[0].draft_token_ids == (3, EOS, 3, 3)
    assert scheduler.plan() is None, "how far it got is not known before the result"
    (output,) = scheduler.apply(StepResult(plan.step_id, [RowResult(0, [3, EOS, 3, 3, 9])]))
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([3, EOS], "stop", EOS)
    scheduler.check()
    assert scheduler.stats().num_pages_cached == 1, "seven tokens stay; the page with what was cut is not named"


def test_drafts_save_steps() -> None:
    class Oracle:
        def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
            known = list(token_ids)
            for _ in range(min(3, max_drafts)):
                known.append(hash((history_of(known), 0)) % VOCAB)
            return known[len(token_ids) :]

    engine = SimulatedEngine(num_pages=32, budget=32, drafter=Oracle(), overlap=False)
    engine.add(request("a", 4, max_tokens=21))
    engine.run()
    assert engine.device.num_steps == 1 + 20 // 4


def test_seeds_are_drawn_reproducibly_and_count_up() -> None:
    drawn = []
    for _ in range(2):
        engine = SimulatedEngine()
        engine.add(request("a", n=3))
        engine.add(request("b", first=2))
        engine.run()
        drawn.append(engine.device.seeds)
    assert drawn[0] == drawn[1]
    first = drawn[0]["a", 0]
    assert [drawn[0]["a", index] - first for index in range(3)] == [0, 1, 2]
    assert drawn[0]["b", 0] != first


def test_seed_wraps_at_64_bits() -> None:
    engine = SimulatedEngine()
    sampling = SamplingParams(n=2, seed=2**63 - 1, max_tokens=2, temperature=0.0)
    engine.add(AddRequest(request_id="a", prompt_token_ids=[1, 2], sampling=sampling))
    engine.run()
    assert engine.device.seeds["a", 1] == -(2**63)


def test_abort_all_gives_every_sequence_its_reason() -> None:
    engine = SimulatedEngine(max_num_seqs=1)
    engine.add(request("a", n=3, prompt_len=9))
    engine.add(request("b"))
    engine.turn()
    outputs = engine.scheduler.abort_all("error", "the server is going away")
    assert sorted((o.request_id, o.index, o.finish_reason, o.error) for o in outputs) == [
        (name, index, "error", "the server is going away") for name, index in (("a", 0), ("a", 1), ("a", 2), ("b", 0))
    ]
    engine.scheduler.check()


def test_contract_breaks_are_named() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("a"))
    with pytest.raises(ValueError, match="already live"):
        scheduler.add(request("a"))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="out of order"):
        scheduler.apply(StepResult(plan.step_id + 1, []))
    assert scheduler.flush_cache() is not None, "refused while requests run"
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        scheduler_of(slots=0)


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
    pool = manager._pools[0]
    add = pool.index.add

    def counting_add(name: bytes, page: int) -> None:
        nonlocal named
        named += 1
        add(name, page)

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
