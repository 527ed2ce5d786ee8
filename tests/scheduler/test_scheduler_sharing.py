"""What sequences share: prefixes, the prompt of n sequences, prompt logprobs."""

from __future__ import annotations

import pytest
from scheduler_tools import request, shape
from simulated_engine import SimulatedEngine

from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams


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
