"""Scheduler, cache manager and runner over a model with windows: what they say together equals a forward of everything.

Prompts come in chunks while others decode, prefixes are found in the cache, memory runs out and sequences start anew;
pages that have left a window are written by others meanwhile.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future

import msgspec
import pytest
from runner_support import engine_config, tiny_model

from tokenspeed.cache.manager import CacheManager
from tokenspeed.config.engine import EngineConfig
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, StepPlan, StepResult, TokenLogprobs
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.interface import Runner
from tokenspeed.scheduler.scheduler import Scheduler

MODEL = msgspec.structs.replace(tiny_model("GptOssForCausalLM"), num_layers=5, layer_windows=(6, None, 6, None, 6))
BUDGET, LENGTH, SLOTS = 16, 60, 5


def config(num_pages: int, budget: int = BUDGET) -> EngineConfig:
    """float32, pages of 4; a pool of `num_pages` pages of each group."""
    sizes = {"max_num_batched_tokens": budget, "max_model_len": LENGTH, "max_num_seqs": SLOTS, "num_pages": num_pages}
    return engine_config(MODEL, dtype="float32", kv_cache_dtype="float32", **sizes)


class Engine:
    """Scheduler and runner in a loop, one step ahead of the results."""

    def __init__(self, settings: EngineConfig) -> None:
        self.runner = build_runner(settings)
        self.cache = CacheManager(self.runner.groups, True, settings.max_num_batched_tokens)
        self.scheduler = Scheduler(
            cache=self.cache,
            eos_token_ids=(),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
        )
        self.runner.capture()
        self.plans: list[StepPlan] = []
        self.said: dict[str, list[TokenLogprobs]] = {}

    def run(self, requests: list[AddRequest]) -> None:
        """Until all have ended; a new one comes every second turn."""
        left = deque(requests)
        queue: deque[Future[StepResult]] = deque()
        while left or self.scheduler.has_work:
            if left and len(self.plans) % 2 == 0:
                assert self.scheduler.add(left.popleft()) == []
            plan = self.scheduler.plan()
            if plan is not None:
                self.plans.append(plan)
                queue.append(self.runner.execute(plan))
            if queue and (plan is None or len(queue) == 2):
                for output in self.scheduler.apply(queue.popleft().result(60)):
                    assert output.error is None
                    self.said.setdefault(output.request_id, []).extend(output.logprobs)
            self.cache.check()


def request(name: str, prompt: list[int], count: int) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True, logprobs=0)
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def check_one_shot(runner: Runner, prompt: list[int], said: list[TokenLogprobs]) -> None:
    """All that was said was the likeliest, as likely as a forward of everything finds it."""
    tokens = prompt + [one.token_id for one in said]
    pages = list(range(-(-len(tokens) // 4)))
    per_group = [[page + index * len(pages) for page in pages] for index in range(len(runner.groups))]
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    admission = Admission(0, "all", 0, tokens, len(tokens), tuple(per_group), sampling)
    no_pages: tuple[list[int], ...] = ([],) * len(runner.groups)
    plan = StepPlan(0, [admission], [Row(0, 0, len(tokens), no_pages, True, False)], len(tokens))
    found = runner.execute(plan).result(60).rows[0].prompt_logprobs[len(prompt) - 1 :]
    assert [one.token_id for one in found] == [one.token_id for one in said]
    assert [one.rank for one in found] == [1] * len(said)
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in said], abs=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_everything_together_equals_a_forward_of_everything(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(config(num_pages=11))
    shared = [rng.randrange(128) for _ in range(24)]
    requests = []
    for number in range(12):
        prefix = shared[: rng.choice([0, 8, 13, 24])]
        prompt = prefix + [rng.randrange(128) for _ in range(rng.randint(1, 20))]
        requests.append(request(str(number), prompt, rng.randint(1, LENGTH - len(prompt) - 1)))
    engine.run(requests)
    engine.runner.close()
    admissions = [admission for plan in engine.plans for admission in plan.admissions]
    assert any(len(admission.token_ids) > admission.prompt_len for admission in admissions), "nobody was preempted"
    assert any(page < 0 for admission in admissions for page in admission.pages[0]), "no hit began behind a window"
    assert any(row.num_tokens > 1 and not row.samples for plan in engine.plans for row in plan.rows), "no chunks"
    alone = build_runner(config(num_pages=40, budget=LENGTH))
    for one in requests:
        assert len(engine.said[one.request_id]) == one.sampling.max_tokens
        check_one_shot(alone, one.prompt_token_ids, engine.said[one.request_id])
    alone.close()
