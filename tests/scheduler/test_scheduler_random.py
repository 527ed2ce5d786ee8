"""Random lives: arrivals, lengths, aborts, tiny memories, both loops. Simulated device and engine judge each."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated_device import POISON, history_of
from simulated_engine import VOCAB, SimulatedEngine

from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams


class GuessingDrafter:
    """Knows the greedy model and lies now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        known, drafts = list(token_ids), []
        for _ in range(self._random.randint(0, min(4, max_drafts))):
            guess = hash((history_of(known), 0)) % VOCAB
            if self._random.random() < 0.3:
                guess = (guess + 1) % VOCAB
            drafts.append(guess)
            known.append(guess)
        return drafts


def random_request(rng: random.Random, request_id: str, max_len: int) -> AddRequest:
    prompt_len = rng.choice([1, rng.randint(1, 8), rng.randint(1, max_len // 2), rng.randint(1, max_len + 2)])
    # Few different tokens and a common opening, so that prefixes meet.
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3][:prompt_len] if rng.random() < 0.7 else []
    prompt += [rng.randint(1, 2) for _ in range(prompt_len - len(prompt))]
    if rng.random() < 0.03:
        prompt[rng.randrange(prompt_len)] = POISON
    max_tokens = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, max_len)])
    sampling = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        temperature=rng.choice([0.0, 0.0, 1.0]),
        seed=rng.choice([None, rng.randint(-5, 5)]),
        stop_token_ids=rng.choice([(), (3,), (3, 0)]),
        ignore_eos=rng.random() < 0.4,
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    salt = rng.choice([None, None, None, "a"])
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        priority=rng.randint(-1, 1),
        cache_salt=salt,
    )


def random_windows(rng: random.Random) -> tuple[int | None, ...]:
    """Windows below, at and above the page sizes, multiples of them and not."""
    small, large = rng.randint(1, 5), rng.randint(5, 14)
    choices: list[tuple[int | None, ...]] = [(None, small), (large, None), (small, None, large), (large,)]
    return rng.choice([*choices[:2], *choices])


def random_engine(rng: random.Random, depth: int, drafts: bool, sliding: bool = False) -> SimulatedEngine:
    page_size = rng.choice([1, 2, 4])
    num_pages = rng.randint(2, 24) * (4 // page_size)
    return SimulatedEngine(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=rng.randint(1, 6),
        budget=rng.choice([1, 3, 8, 64]),
        max_model_len=rng.randint(6, 48),
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fifo", "priority"]),
        depth=depth,
        drafter=GuessingDrafter(rng.randint(0, 99)) if drafts else None,
        windows=random_windows(rng) if sliding else (None,),
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("block", range(2))
def test_random_lives(block: int, sliding: bool, depth: int, drafts: bool) -> None:
    for case in range(25):
        rng = random.Random(f"{block} {case}")
        engine = random_engine(rng, depth, drafts, sliding)
        for number in range(rng.randint(1, 14)):
            engine.add(random_request(rng, f"r{number}", engine.max_len))
            for _ in range(rng.choice([0, 0, 1, 3, 10])):
                engine.turn()
            if rng.random() < 0.2:
                engine.abort(f"r{rng.randint(0, number)}", rng.choice([None, 0, 1]))
        engine.run(max_turns=20_000)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sliding", [False, True])
def test_crowded_lives(depth: int, drafts: bool, sliding: bool) -> None:
    """Long outputs in a pool for two or three of them: preemption is what mostly happens."""
    num_preemptions = 0
    for case in range(25):
        rng = random.Random(f"crowd {case}")
        num_pages, page_size = rng.randint(5, 9), rng.choice([2, 3])
        engine = SimulatedEngine(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=rng.randint(3, 8),
            budget=rng.choice([2, 4, 16]),
            max_model_len=num_pages * page_size,
            prefix_caching=rng.random() < 0.5,
            policy=rng.choice(["fifo", "priority"]),
            depth=depth,
            drafter=GuessingDrafter(case) if drafts else None,
            windows=random_windows(rng) if sliding else (None,),
        )
        for number in range(12):
            sampling = SamplingParams(
                n=rng.choice([1, 1, 3]),
                max_tokens=rng.randint(2, 2 * num_pages),
                temperature=rng.choice([0.0, 1.0]),
                ignore_eos=rng.random() < 0.8,
                prompt_logprobs=rng.choice([None, 0]),
            )
            prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, num_pages))]
            priority = rng.randint(0, 2)
            engine.add(
                AddRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, priority=priority)
            )
            for _ in range(rng.randint(0, 3)):
                engine.turn()
            if rng.random() < 0.1:
                engine.abort(f"r{rng.randint(0, number)}", rng.choice([None, 0, 1]))
        engine.run(max_turns=20_000)
        num_preemptions += engine.scheduler.stats().num_preemptions
    assert num_preemptions > 100, "the memory was not tight enough to test anything"


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest life that breaks something."""

    @initialize(seed=st.integers(0, 2**16), depth=st.integers(1, 3), drafts=st.booleans(), sliding=st.booleans())
    def begin(self, seed: int, depth: int, drafts: bool, sliding: bool) -> None:
        self.engine = random_engine(random.Random(seed), depth, drafts, sliding)
        self.count = 0

    @rule(seed=st.integers(0, 2**16))
    def add(self, seed: int) -> None:
        self.engine.add(random_request(random.Random(seed), f"r{self.count}", self.engine.max_len))
        self.count += 1

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.turn()

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([None, 0, 1]))
        self.engine.abort(f"r{data.draw(st.integers(0, self.count - 1))}", index)

    @rule()
    def abort_all(self) -> None:
        self.engine._take(self.engine.scheduler.abort_all())

    @rule()
    def flush(self) -> None:
        refused = self.engine.scheduler.flush_cache()
        assert refused is not None or self.engine.cache.num_pages_free == self.engine.cache.num_pages_total

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(max_turns=20_000)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
