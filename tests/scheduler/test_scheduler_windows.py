"""Sliding-window groups: chunks that reserve as they go, who waits, and what one sequence can reach."""

from __future__ import annotations

import pytest
from scheduler_tools import request, shape
from simulated_engine import SimulatedEngine

from tokenspeed.cache.spec import GONE
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams

TWO = (None, 6)  # a full group and a window of 6 tokens, with pages of 4


def test_a_long_prompt_takes_window_pages_chunk_by_chunk() -> None:
    engine = SimulatedEngine(num_pages=32, budget=8, windows=TWO, overlap=False)
    engine.add(request("a", 30, max_tokens=3))
    plans = []
    most = 0
    while engine.scheduler.has_work:
        plan = engine.turn()
        assert plan is not None
        plans.append(([len(p) for a in plan.admissions for p in a.pages], [len(p) for p in plan.rows[0].new_pages]))
        most = max(most, engine.cache.num_pages_used)
    engine.check_idle()
    assert plans == [([8, 2], [0, 0]), ([], [0, 2]), ([], [0, 2]), ([], [0, 2]), ([], [0, 0]), ([], [0, 0])]
    assert most == 8 + 2, "between the steps a window is all that is held"


def test_a_hit_is_admitted_with_marks_where_nothing_is_needed() -> None:
    engine = SimulatedEngine(num_pages=32, budget=32, windows=TWO)
    engine.add(request("a", 17, max_tokens=1))
    engine.run()
    engine.add(request("b", 17, max_tokens=3))
    plan = engine.turn()
    assert plan is not None and shape(plan) == [(16, 1, False)]
    (admission,) = plan.admissions
    full, sliding = admission.pages
    assert GONE not in full and len(full) == 5
    assert sliding[:2] == [GONE, GONE] and GONE not in sliding[2:] and len(sliding) == 5
    engine.run()
    assert engine.tokens("a") == engine.tokens("b")[:1]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("num_pages", [5, 9, 16])
def test_one_sequence_reaches_the_capacity_alone_and_is_never_preempted(
    num_pages: int, window: int, budget: int, depth: int
) -> None:
    engine = SimulatedEngine(num_pages=num_pages, budget=budget, windows=(window, None), depth=depth, max_model_len=999)
    capacity = engine.cache.capacity_tokens
    assert num_pages * 4 // 2 - 4 < capacity <= num_pages * 4
    for number, prompt_len in enumerate((1, capacity // 2, capacity - 1)):
        if 1 <= prompt_len < capacity:
            engine.add(request(f"r{number}", prompt_len, first=number, max_tokens=999))
            engine.run()
            assert prompt_len + len(engine.tokens(f"r{number}")) == capacity
    assert engine.scheduler.stats().num_preemptions == 0
    engine.add(request("long", capacity, max_tokens=1))
    assert engine.finish("long") == "error"


def test_a_chunk_in_flight_is_waited_for_where_the_pool_is_short() -> None:
    """Overlapped, the second chunk comes before the first has left the window: it waits one turn, nobody suffers."""
    engine = SimulatedEngine(num_pages=5 + 3, budget=8, windows=(None, 2), prefix_caching=False)
    assert engine.cache.capacity_tokens == 20
    engine.add(request("a", 19, max_tokens=1))
    assert shape(engine.turn()) == [(0, 8, False)]
    assert engine.cache.num_pages_free == 1, "the next chunk needs two"
    assert engine.turn() is None
    assert shape(engine.turn()) == [(8, 8, False)]
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0


def blocked_engine() -> SimulatedEngine:
    """b, the younger, is in the middle of its prompt and finds no pages for its next chunk; a decodes, c waits."""
    engine = SimulatedEngine(
        num_pages=18, budget=17, windows=(None, 4), prefix_caching=False, max_model_len=32, overlap=False
    )
    engine.add(request("a", 8, max_tokens=10))
    engine.turn()
    engine.add(request("b", 31, first=2, max_tokens=1))
    engine.turn()
    engine.add(request("c", 1, first=3, max_tokens=2))
    return engine


def test_nobody_enters_while_a_chunk_waits_and_decodes_go_on() -> None:
    engine = blocked_engine()
    for start in (9, 10):
        assert shape(engine.turn()) == [(start, 1, True)], "a decodes, b waits, and c must not take what b waits for"
    assert engine.cache.num_pages_free == 5, "c would need two pages, and two to spare"
    assert shape(engine.turn()) == [(11, 1, True), (16, 15, False)], "a page has left a's window"
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert all(engine.finish(name) == "length" for name in "abc")


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_n_sequences_share_a_prompt_longer_than_the_window(prefix_caching: bool, overlap: bool) -> None:
    engine = SimulatedEngine(num_pages=48, budget=64, windows=TWO, prefix_caching=prefix_caching, overlap=overlap)
    engine.add(request("a", 26, n=4, max_tokens=3))
    engine.run()
    assert engine.device.num_tokens == 26 + 3 * 2 + 4 * 2, "the prompt, three partial pages, two decodes each"


def test_a_conversation_goes_on_from_its_last_window() -> None:
    engine = SimulatedEngine(num_pages=32, budget=64, windows=TWO)
    engine.add(request("a", 14, max_tokens=12))
    engine.run()
    history = request("a", 14).prompt_token_ids + engine.tokens("a")
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    engine.add(AddRequest(request_id="b", prompt_token_ids=[*history, 4, 4], sampling=sampling))
    engine.run()
    assert engine.news["b", 0][0].num_cached_tokens == 24


def test_nearly_twice_the_sequences_run_at_once() -> None:
    most = []
    for windows in ((None, 6), (None, None)):
        engine = SimulatedEngine(
            num_pages=960, budget=999, max_num_seqs=32, windows=windows, max_model_len=200, prefix_caching=False
        )
        engine.check = False
        for number in range(24):
            engine.add(request(f"r{number}", 150, first=number, max_tokens=30))
        running = 0
        while engine.scheduler.has_work:
            engine.turn()
            running = max(running, engine.scheduler.num_running)
        engine.check_idle()
        most.append(running)
    assert most[0] >= 1.75 * most[1], most


@pytest.mark.parametrize("changed", ["budget", "overlap", "prefix_caching", "num_pages", "max_num_seqs"])
def test_greedy_tokens_do_not_depend_on_how_they_are_scheduled(changed: str) -> None:
    base = {"budget": 64, "overlap": True, "prefix_caching": True, "num_pages": 128, "max_num_seqs": 8}
    other = {"budget": 1, "overlap": False, "prefix_caching": False, "num_pages": 30, "max_num_seqs": 1}
    said = []
    for options in (base, {**base, changed: other[changed]}):
        engine = SimulatedEngine(max_model_len=40, windows=TWO, **options)  # type: ignore[arg-type]
        for number in range(6):
            engine.add(request(f"r{number}", 3 + 5 * number, first=number % 2, max_tokens=12, n=1 + number % 2))
        engine.run()
        said.append({key: engine.tokens(*key) for key in engine.news})
    assert said[0] == said[1]
