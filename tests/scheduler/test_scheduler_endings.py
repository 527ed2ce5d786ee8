"""How sequences end: stop, length, error, abort; drafts cut by an ending; seeds; broken contracts."""

from __future__ import annotations

import pytest
from scheduler_tools import answer, request, scheduler_of
from simulated_device import EOS, POISON, history_of
from simulated_engine import VOCAB, SimulatedEngine

from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, StepResult
from tokenspeed.scheduler.scheduler import Scheduler


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
