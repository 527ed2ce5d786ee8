from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_sampler import CPU, admission, distribution, edited, sampler_of

from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.sampling.filters import MAX_VOCAB, DrawParams, draw
from tokenspeed.sampling.sampler import NAN_LOGITS, Sampler

GREEDY = SamplingParams(temperature=0.0, seed=0)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, sampling: SamplingParams, count: int) -> np.ndarray:
    """`count` draws from one row of logits, by as many seeds, as frequencies."""
    params = DrawParams(
        temperature=[sampling.temperature] * count,
        top_k=[sampling.top_k] * count,
        top_p=[sampling.top_p] * count,
        min_p=[sampling.min_p] * count,
        uniform=[(i + 0.5) / count for i in range(count)],
    )
    ids = draw(logits.expand(count, -1), params)
    return np.bincount(ids.numpy(), minlength=logits.shape[-1]) / count


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=2),
    SamplingParams(top_k=7),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=9, top_p=0.8, min_p=0.05, temperature=1.3),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=repr)
@pytest.mark.parametrize("vocab_size", [12, 100])
def test_filters_give_the_exact_distribution(sampling: SamplingParams, vocab_size: int) -> None:
    """Evenly spaced uniforms turn the inverse distribution function into exact frequencies."""
    logits = random_logits(1, vocab_size, seed=vocab_size, scale=2.0)
    count = 4000
    want = distribution(logits[0].numpy(), sampling)
    got = draws(logits, sampling, count)
    assert np.abs(got - want).max() <= 1.5 / count
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(want))


def test_ends_of_the_unit_interval() -> None:
    """The least and the greatest uniform must not give a token of weight zero."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -1.0, -torch.inf]])
    for value, want in ((0.0, 1), (1 - 2.0**-53, 3)):
        assert draw(logits, DrawParams([1.0], [0], [1.0], [0.0], [value])).tolist() == [want]


def test_hashed_uniforms_pass_chi_square() -> None:
    """Twenty thousand positions of one sequence against the exact distribution of eight tokens (fixed seed)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -0.5, 0.2]])
    sampling = SamplingParams(seed=1234)
    sampler = Sampler(1, 8, CPU)
    sampler.admit(admission(0, sampling))
    num_draws = 20_000
    tokens = Counter(int(sampler.sample(logits, [0], [position]).token_ids[0]) for position in range(3, 3 + num_draws))
    want = distribution(logits[0].numpy(), sampling) * num_draws
    chi_square = sum((tokens[i] - want[i]) ** 2 / want[i] for i in range(8))
    assert chi_square < 24.3  # 7 degrees of freedom: p = 0.001


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_fuzz_drawn_tokens_are_possible(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 40))
    # A grid: logits closer than float32's exp can tell are ties to the sampler, but not to the naive float64.
    values = st.one_of(st.integers(-2000, 2000).map(lambda n: n / 64), st.sampled_from([0.0, 1.0, -100.0]))
    logits = torch.tensor([data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size))])
    sampling = SamplingParams(
        temperature=data.draw(st.floats(0.05, 2.0)),
        top_k=data.draw(st.integers(-1, 50)),
        top_p=data.draw(st.floats(1e-6, 1.0)),
        min_p=data.draw(st.floats(0.0, 1.0)),
        seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
    )
    token = sampler_of([sampling], vocab_size).sample(logits, [0], [data.draw(st.integers(3, 9999))]).finish()[0]
    # A hair of slack: a nucleus that ends within rounding of top_p may hold one token more or less.
    loose = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=min(1.0, sampling.top_p + 1e-6),
        min_p=max(0.0, sampling.min_p - 1e-6),
    )
    assert token.error is None
    assert distribution(logits[0].numpy(), loose)[token.token_id] > 0


MIXED = [
    GREEDY,
    SamplingParams(seed=7),
    SamplingParams(seed=8, top_k=5),
    SamplingParams(seed=9, top_p=0.7),
    SamplingParams(seed=10, min_p=0.1, temperature=0.7),
    SamplingParams(seed=11, top_k=2000, top_p=0.999, temperature=2.0),
    SamplingParams(seed=12, frequency_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(seed=13, logit_bias={5: 3.0}, logprobs=2),
    SamplingParams(seed=14, temperature=0.0, presence_penalty=1.0),
]


@pytest.mark.parametrize("vocab_size", [50, 4099])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int, num_threads: int) -> None:
    logits = random_logits(len(MIXED), vocab_size, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for step in range(5):
            batch = sampler_of(MIXED, vocab_size)
            together = batch.sample(logits, list(range(len(MIXED))), [3 + step] * len(MIXED)).finish()
            for row, sampling in enumerate(MIXED):
                alone = sampler_of([sampling], vocab_size).sample(logits[row : row + 1], [0], [3 + step]).finish()[0]
                assert alone.token_id == together[row].token_id
            order = list(reversed(range(len(MIXED))))
            swapped = sampler_of(MIXED, vocab_size).sample(logits[order], order, [3 + step] * len(order)).finish()
            assert [sample.token_id for sample in swapped] == [together[row].token_id for row in order]
    finally:
        torch.set_num_threads(before)


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 1000)

    def text(seed: int) -> list[int]:
        sampler = sampler_of([SamplingParams(seed=seed)], 1000)
        return [sampler.sample(logits, [0], [position]).finish()[0].token_id for position in range(3, 23)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(-1) == text(-1) != text(1)
    assert len(set(text(1))) > 10


def test_golden_draws_stay_what_they_are() -> None:
    """The same seed must give the same text in every version: these ids are a promise, not a measurement."""
    sampler = sampler_of([SamplingParams(seed=42)], 1000)
    logits = torch.linspace(0, 3, 1000)[None]
    assert [int(sampler.sample(logits, [0], [p]).token_ids[0]) for p in range(3, 11)] == GOLDEN


GOLDEN = [275, 877, 276, 518, 903, 380, 895, 861]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_penalties_equal_naive(data: st.DataObject) -> None:
    vocab_size = 20
    token = st.integers(0, vocab_size - 1)
    prompt = tuple(data.draw(st.lists(token, min_size=1, max_size=8)))
    output = tuple(data.draw(st.lists(token, max_size=4)))
    sampling = SamplingParams(
        temperature=0.0,
        seed=0,
        min_tokens=data.draw(st.integers(0, 8)),
        presence_penalty=data.draw(st.floats(-2, 2)),
        frequency_penalty=data.draw(st.floats(-2, 2)),
        repetition_penalty=data.draw(st.floats(0.1, 2)),
        logit_bias=data.draw(st.dictionaries(st.integers(0, 25), st.floats(-100, 100), max_size=3)),
    )
    banned = tuple(data.draw(st.lists(token, max_size=3)))
    sampler = Sampler(4, vocab_size, CPU)
    sampler.admit(admission(2, sampling, prompt, output, banned))
    tokens = list(output)
    for step in range(6):
        logits = random_logits(1, vocab_size, seed=step)
        got = sampler.sample(logits, [2], [len(prompt) + len(tokens)]).finish()[0].token_id
        want = edited(logits[0].numpy(), sampling, list(prompt), tokens, banned)
        assert want[got] >= want.max() - 1e-4
        tokens.append(got)


def test_counts_survive_other_slots_coming_and_going() -> None:
    """Slots share a pool of counts that grows and is reused; each must see its own."""
    sampler = Sampler(16, 10, CPU)
    strong = SamplingParams(temperature=0.0, seed=0, presence_penalty=2.0)
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7, 0, 0, 0, 0, 0, 0]])
    sampler.admit(admission(0, strong))
    assert sampler.sample(logits, [0], [3]).finish()[0].token_id == 0
    for slot in range(1, 16):
        sampler.admit(admission(slot, strong, output=(0, 1)))
    assert sampler.sample(logits, [0], [4]).finish()[0].token_id == 1
    batch = sampler.sample(logits.expand(2, -1).contiguous(), [15, 0], [5, 5]).finish()
    assert [sample.token_id for sample in batch] == [2, 2]
    sampler.admit(admission(15, GREEDY))
    sampler.admit(admission(14, strong))
    batch = sampler.sample(logits.expand(2, -1).contiguous(), [15, 14], [3, 3]).finish()
    assert [sample.token_id for sample in batch] == [0, 0]


def test_prompt_tokens_count_for_repetition_only() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.5]])
    for sampling, want in [
        (SamplingParams(temperature=0.0, seed=0, presence_penalty=2.0, frequency_penalty=2.0), 1),
        (SamplingParams(temperature=0.0, seed=0, repetition_penalty=2.0), 2),
    ]:
        sampler = Sampler(1, 3, CPU)
        sampler.admit(admission(0, sampling, prompt=(1,)))
        assert sampler.sample(logits, [0], [1]).finish()[0].token_id == want


def test_nan_row_fails_alone() -> None:
    good = [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9, logprobs=1)]
    bad = [GREEDY, SamplingParams(seed=3, top_k=3), SamplingParams(seed=4, top_p=0.5, frequency_penalty=1.0), GREEDY]
    logits = random_logits(7, 50)
    clean = sampler_of(good, 50).sample(logits[:3], [0, 1, 2], [3] * 3).finish()
    logits[3, 10] = torch.nan
    logits[4] = torch.nan
    logits[5, 0] = torch.inf
    logits[6] = -torch.inf
    samples = sampler_of([*good, *bad], 50).sample(logits, list(range(7)), [3] * 7).finish()
    assert samples[:3] == clean
    assert [sample.error for sample in samples] == [None] * 3 + [NAN_LOGITS] * 4
    assert [sample.token_id for sample in samples[3:]] == [0] * 4


def test_greedy_takes_the_first_of_ties_and_ties_survive_filters() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert sampler_of([GREEDY], 4).sample(logits, [0], [3]).finish()[0].token_id == 1
    edit = SamplingParams(temperature=0.0, seed=0, logit_bias={0: -1.0})
    assert sampler_of([edit], 4).sample(logits, [0], [3]).finish()[0].token_id == 1
    kept = draws(logits, SamplingParams(top_k=2, top_p=0.01), 1000)
    assert kept[1] == kept[2] == 0.5


def test_tiny_top_p_and_top_k_1_keep_the_best() -> None:
    logits = random_logits(1, 500)
    best = int(logits.argmax())
    for sampling in (
        SamplingParams(seed=5, top_p=1e-9),
        SamplingParams(seed=5, top_k=1),
        SamplingParams(seed=5, min_p=1),
    ):
        assert sampler_of([sampling], 500).sample(logits, [0], [3]).finish()[0].token_id == best


def test_nucleus_of_a_flat_distribution_is_wide() -> None:
    """Thousands of equal weights: beyond the small sort that usually suffices."""
    logits = torch.zeros(1, 5000)
    logits[0, 2500:] = -0.5
    got = draws(logits, SamplingParams(top_p=0.5), 20_000)
    assert np.count_nonzero(got[:2500]) > 2400 and not got[2500:].any()


def test_min_tokens_bans_until_enough() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    sampler = Sampler(1, 3, CPU)
    sampler.admit(admission(0, SamplingParams(temperature=0.0, seed=0, min_tokens=2), prompt=(0,), banned=(1, 99)))
    assert [sampler.sample(logits, [0], [p]).finish()[0].token_id for p in (1, 2, 3)] == [2, 2, 1]
    sampler.admit(admission(0, GREEDY, prompt=(0,), banned=(1,)))
    assert sampler.sample(logits, [0], [1]).finish()[0].token_id == 1


def test_logit_bias_forces_and_forbids() -> None:
    logits = random_logits(1, 30)
    best = int(logits.argmax())
    for params in (dict(temperature=0.0), dict(temperature=1.0)):
        force = SamplingParams(seed=1, logit_bias={17: 100.0, 10_000: 5.0}, **params)
        forbid = SamplingParams(seed=1, logit_bias={best: -100.0}, **params)
        assert sampler_of([force], 30).sample(logits, [0], [3]).finish()[0].token_id == 17
        assert sampler_of([forbid], 30).sample(logits, [0], [3]).finish()[0].token_id != best


def test_logits_are_not_changed() -> None:
    logits = random_logits(len(MIXED), 50)
    copy = logits.clone()
    sampler_of(MIXED, 50).sample(logits, list(range(len(MIXED))), [3] * len(MIXED))
    assert torch.equal(logits, copy)


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = random_logits(3, 40)
    params = [
        SamplingParams(seed=1, temperature=0.3, top_k=2, logprobs=3),
        GREEDY,
        SamplingParams(seed=1, temperature=0.0, logit_bias={4: 100.0}, logprobs=0),
    ]
    samples = sampler_of(params, 40).sample(logits, [0, 1, 2], [3] * 3).finish()
    want = torch.log_softmax(logits, -1)
    first, last = samples[0].logprobs, samples[2].logprobs
    assert samples[1].logprobs is None and first is not None and last is not None
    assert first.logprob == pytest.approx(float(want[0, samples[0].token_id]), abs=1e-5)
    assert first.top_ids == want[0].topk(3).indices.tolist()
    assert last.token_id == 4 and last.top_ids == []
    assert last.rank == 1 + int((logits[2] > logits[2, 4]).sum())


def test_empty_batch_and_misuse() -> None:
    sampler = Sampler(2, 10, CPU)
    assert sampler.sample(torch.zeros(0, 10), [], []).finish() == []
    with pytest.raises(ValueError, match="slot 1 was never admitted"):
        sampler.sample(torch.zeros(1, 10), [1], [3])
    with pytest.raises(ValueError, match="without a seed"):
        sampler.admit(admission(0, SamplingParams()))
    with pytest.raises(ValueError, match="vocabulary has"):
        Sampler(1, MAX_VOCAB + 1, CPU)
