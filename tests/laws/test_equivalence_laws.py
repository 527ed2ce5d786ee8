"""Laws of correctness: what a request's tokens are does not depend on how, when and beside whom they are computed.

Each law compares one way of running with the plainest one (each request alone, whole prompt, no prefix cache, no
overlap), on random float32 models of every family. Each variant also proves that it did what it is named after.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from law_engine import FAMILIES, VOCAB, Engine, Run, Text, engine_config, run, write_model

from tokenspeed.protocol.messages import AbortRequest, AddRequest, SequenceOutput
from tokenspeed.protocol.sampling import SamplingParams

Truth = dict[tuple[str, int], Text]


def prompts() -> dict[str, list[int]]:
    """Lengths around page borders (pages of 4), one token, and two pairs that share a beginning."""
    rng = random.Random(3)
    lengths = {"one": 1, "page": 4, "over": 5, "long": 41, "twin": 37, "mid": 19}
    drawn = {name: [rng.randrange(VOCAB) for _ in range(length)] for name, length in lengths.items()}
    drawn["twin"][:30] = drawn["long"][:30]
    drawn["mid"][:5] = drawn["over"]
    return drawn


PARAMS: dict[str, SamplingParams] = {
    "one": SamplingParams(temperature=0.0, max_tokens=20),
    "page": SamplingParams(temperature=1.0, seed=5, max_tokens=16, top_p=0.9),
    "over": SamplingParams(temperature=0.0, max_tokens=24, frequency_penalty=0.8, presence_penalty=0.4, logprobs=3),
    "long": SamplingParams(temperature=0.0, max_tokens=21),
    "twin": SamplingParams(
        temperature=0.8, seed=-9, max_tokens=18, top_k=20, repetition_penalty=1.3, prompt_logprobs=2
    ),
    "mid": SamplingParams(temperature=1.2, seed=5, max_tokens=15, min_p=0.05, stop_token_ids=(3, 7, 11), min_tokens=4),
}
REQUESTS = [
    AddRequest(request_id=name, prompt_token_ids=prompt, sampling=PARAMS[name]) for name, prompt in prompts().items()
]


def strangers(count: int) -> list[AddRequest]:
    """Other people's requests, of all kinds."""
    rng = random.Random(8)
    return [
        AddRequest(
            request_id=f"stranger-{number}",
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=rng.randint(1, 30), top_k=rng.choice([0, 8])
            ),
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: write_model(Path(tmp_path_factory.mktemp(family)), family) for family in FAMILIES}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, folders: dict[str, str]) -> str:
    return folders[family]


@pytest.fixture(scope="module")
def truth(folder: str) -> Truth:
    """Each request alone in an engine with everything off."""
    texts: Truth = {}
    with Engine(engine_config(folder)) as engine:
        for request in REQUESTS:
            texts |= engine.run([request]).texts
    lengths = {text.finish_reason for text in texts.values()}
    assert lengths <= {"stop", "length"}
    assert len({tuple(text.token_ids[:6]) for text in texts.values()}) == len(REQUESTS), "texts do not differ"
    return texts


def compare(got: Truth, truth: Truth) -> None:
    """Tokens are equal, logprobs to rounding."""
    for key, text in truth.items():
        assert (got[key].token_ids, got[key].finish_reason) == (text.token_ids, text.finish_reason), key
        for ours, theirs in (
            (got[key].logprobs, text.logprobs),
            (got[key].prompt_logprobs, text.prompt_logprobs),
        ):
            assert [(one.token_id, one.rank, one.top_ids) for one in ours] == [
                (one.token_id, one.rank, one.top_ids) for one in theirs
            ]
            assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def many_small_steps(ran: Run) -> bool:
    return max(ran.stats.step_tokens) == 1


def bounded_steps(ran: Run) -> bool:
    return max(ran.stats.step_tokens) == 7


def mixed_steps(ran: Run) -> bool:
    return max(ran.stats.step_tokens) > 60


def preempted(ran: Run) -> bool:
    return ran.stats.num_preemptions > 0


def one_at_a_time(ran: Run) -> bool:
    return sum(count == 1 for count in ran.stats.step_tokens) > 80


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Run], bool]]] = {
    "together": ({}, mixed_steps),
    "chunks-of-1": ({"chunked_prefill_size": 1}, many_small_steps),
    "chunks-of-7": ({"chunked_prefill_size": 7}, bounded_steps),
    "overlap": ({"disable_overlap_schedule": False}, mixed_steps),
    "graphs": ({"enforce_eager": False}, mixed_steps),
    "graphs-overlap": ({"enforce_eager": False, "disable_overlap_schedule": False}, mixed_steps),
    "one-slot": ({"max_num_seqs": 1}, one_at_a_time),
    "pages-of-1": ({"prefix_granularity": 1}, mixed_steps),
    "pages-of-32": ({"prefix_granularity": 32}, mixed_steps),
    "preemption": ({"max_total_tokens": 96, "max_model_len": 90}, preempted),
    "everything": (
        {
            "chunked_prefill_size": 13,
            "disable_overlap_schedule": False,
            "enforce_eager": False,
            "enable_prefix_caching": True,
            "max_total_tokens": 96,
            "max_model_len": 90,
            "max_num_seqs": 5,
        },
        preempted,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on_how_they_are_computed(variant: str, folder: str, truth: Truth) -> None:
    options, happened = VARIANTS[variant]
    ran = run(engine_config(folder, **options), REQUESTS)
    assert happened(ran), f"the variant did not do what it is named after: {ran.stats}"
    compare(ran.texts, truth)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_from_the_cache_gives_the_same_tokens(overlap: bool, folder: str, truth: Truth) -> None:
    """Twice in one engine: the second time every prompt but the one with prompt logprobs is found, and so are the
    outputs' pages by prompts that go on from them."""
    options = {"enable_prefix_caching": True, "disable_overlap_schedule": not overlap}
    with Engine(engine_config(folder, **options)) as engine:
        first = engine.run(REQUESTS)
        second = engine.run(REQUESTS)
        compare(first.texts, truth)
        compare(second.texts, truth)
        assert second.stats.num_prefix_hit_tokens - first.stats.num_prefix_hit_tokens >= 40 + 16 + 4
        long = next(request for request in REQUESTS if request.request_id == "long")
        whole = truth["long", 0].token_ids
        again = msgspec.structs.replace(
            long,
            prompt_token_ids=long.prompt_token_ids + whole[:10],
            sampling=SamplingParams(temperature=0.0, max_tokens=len(whole) - 10),
        )
        third = engine.run([again])
    assert third.texts["long", 0].token_ids == whole[10:]
    assert third.stats.num_prefix_hit_tokens - second.stats.num_prefix_hit_tokens >= 48


@pytest.mark.parametrize("overlap", [False, True])
def test_strangers_in_the_batch_change_nothing(overlap: bool, folder: str, truth: Truth) -> None:
    """Greedy and seeded texts, first, last and amidst others that come and go."""
    others = strangers(14)
    mixed = others[:5] + REQUESTS[:3] + others[5:9] + REQUESTS[3:] + others[9:]
    config = engine_config(folder, disable_overlap_schedule=not overlap, max_num_seqs=9, chunked_prefill_size=50)
    compare(run(config, mixed).texts, truth)


@pytest.mark.parametrize("caching", [False, True])
def test_n_sequences_equal_n_requests(caching: bool, folder: str) -> None:
    """Sequence i of n draws with seed + i; what they share they share in memory only."""
    (prompt,) = (request.prompt_token_ids for request in REQUESTS if request.request_id == "mid")
    sampling = SamplingParams(n=4, seed=40, temperature=1.0, max_tokens=14, logprobs=1)
    config = engine_config(folder, enable_prefix_caching=caching, disable_overlap_schedule=False)
    together = run(config, [AddRequest(request_id="n", prompt_token_ids=prompt, sampling=sampling)])
    singles = [
        AddRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(sampling, n=1, seed=40 + index),
        )
        for index in range(4)
    ]
    plain = engine_config(folder)
    apart: Truth = {}
    for single in singles:
        apart[("n", int(single.request_id))] = run(plain, [single]).texts[single.request_id, 0]
    assert len({tuple(text.token_ids) for text in apart.values()}) == 4
    compare(together.texts, apart)


def test_an_abort_changes_no_neighbour(folder: str, truth: Truth) -> None:
    """Strangers are aborted at their first, second, ... news, one of them while it waits; memory is too small for
    all, so that their pages are handed on at once."""
    others = [
        AddRequest(
            request_id=f"gone-{number}",
            prompt_token_ids=[number] * (5 + 3 * number),
            sampling=SamplingParams(temperature=0.0, max_tokens=60, n=2),
        )
        for number in range(6)
    ]
    news: dict[str, int] = {}

    def abort(output: SequenceOutput) -> list[AbortRequest]:
        name = output.request_id
        if not name.startswith("gone") or output.finish_reason is not None:
            return []
        news[name] = news.get(name, 0) + 1
        whole = AbortRequest(name)
        if news[name] == 1:
            return [AbortRequest(name, 0), AbortRequest("gone-5")]  # one of two sequences; and one that waits
        return [whole] if news[name] == 2 + int(name[-1]) else []

    mixed = [request for pair in zip(others, REQUESTS, strict=True) for request in pair]
    config = engine_config(
        folder,
        disable_overlap_schedule=False,
        enable_prefix_caching=True,
        max_total_tokens=160,
        max_model_len=128,
        chunked_prefill_size=32,
    )
    with Engine(config) as engine:
        ran = engine.run(mixed, abort)
    compare(ran.texts, truth)
    assert {text.finish_reason for (name, _), text in ran.texts.items() if name.startswith("gone")} == {"abort"}


def test_the_same_seed_gives_the_same_text_twice_and_another_seed_another(folders: dict[str, str]) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=24)
    seeds = {"a": 1, "b": 1, "c": 2, "d": None, "e": None}
    requests = [
        AddRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=msgspec.structs.replace(sampling, seed=seed))
        for name, seed in seeds.items()
    ]
    texts = run(engine_config(folders["llama"], disable_overlap_schedule=False), requests).texts
    a, b, c, d, e = (texts[name, 0].token_ids for name in seeds)
    assert a == b
    assert len({tuple(text) for text in (a, c, d, e)}) == 4


def test_the_same_engine_seed_repeats_what_was_left_open(folders: dict[str, str]) -> None:
    """Requests without a seed: the engine draws theirs from its own."""
    request = AddRequest(
        request_id="open", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(temperature=1.0, max_tokens=24)
    )
    first, second, other = (run(engine_config(folders["llama"], seed=seed), [request]).tokens() for seed in (4, 4, 5))
    assert first == second != other
