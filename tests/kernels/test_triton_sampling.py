"""Sampling inside decode graphs: exact filters, fair draws, rows that depend on nobody else; and the graphs' inputs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from kernel_device import DEVICE, ON_GPU

from tokenspeed.kernels.slot_ops import PickedRows, SlotSampling
from tokenspeed.kernels.triton.sampling import LISTED, redraw_rows, sample_rows

VOCAB = 5000 if ON_GPU else 4200  # more than one chunk of the drawing kernel


def sampling(**fields: list[float]) -> SlotSampling:
    """Parameters by slot; what is not given is off (temperature 1)."""
    size = len(next(iter(fields.values())))

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(fields.get(name, [default] * size), dtype=dtype, device=DEVICE)

    return SlotSampling(
        temperature=column("temperature", 1.0, torch.float32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        seed=column("seed", 0, torch.int64),
    )


def draw(logits: torch.Tensor, params: SlotSampling, position: int, slots: list[int] | None = None) -> list[int]:
    rows = logits.shape[0]
    chosen = torch.tensor(slots or list(range(rows)), dtype=torch.int32, device=DEVICE)
    positions = torch.full((rows,), position, dtype=torch.int64, device=DEVICE)
    token_ids = torch.full((params.seed.shape[0], 600), -7, dtype=torch.int64, device=DEVICE)
    out = sample_rows(logits, chosen, positions, params, token_ids, pdl=ON_GPU).tolist()
    assert token_ids[chosen.long(), position].tolist() == [max(token, 0) for token in out]
    return out


def test_greedy_is_the_first_best() -> None:
    logits = torch.randn(3, VOCAB, device=DEVICE)
    logits[1, 40] = logits[1, VOCAB - 1] = 9.0
    out = draw(logits, sampling(temperature=[0.0, 0.0, 0.0]), 3)
    assert out[0] == int(logits[0].argmax())
    assert out[1] == 40


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn, by sorting."""
    order = logits.double().sort(descending=True)
    count = VOCAB if top_k == 0 else top_k
    scaled = (order.values / temperature)[:count]
    probabilities = scaled.softmax(0)
    allowed = int((probabilities.cumsum(0) < top_p).sum()) + 1
    allowed = min(allowed, int((probabilities >= min_p * probabilities[0]).sum()))
    return set(order.indices[:allowed].tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(7, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.5, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.2), (20, 0.8, 0.0)],
)
def test_filters_keep_exactly_what_sorting_keeps(top_k: int, top_p: float, min_p: float) -> None:
    """With a temperature of 0.7 over well separated logits, and draws enough to see every kept token."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randperm(VOCAB, generator=generator) * -0.11 + 10).to(torch.float32)[None].to(DEVICE)
    params = sampling(temperature=[0.7], top_k=[top_k], top_p=[top_p], min_p=[min_p], seed=[11])
    expected = kept(logits[0], 0.7, top_k, top_p, min_p)
    drawn = Counter(draw(logits, params, position)[0] for position in range(400 if ON_GPU else 5))
    assert set(drawn) <= expected
    likely = {token for token in expected if float((logits[0] / 0.7).softmax(0)[token]) > (0.06 if ON_GPU else 0.9)}
    assert likely <= set(drawn)


def normal(dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * scale).to(dtype)


def with_few(count: int) -> torch.Tensor:
    """Finite for so many tokens only."""
    logits = torch.full((VOCAB,), -torch.inf)
    logits[-count:] = torch.linspace(0, 1, count)
    return logits


CASES = {
    "flat": (normal(torch.float32), [(20, 0.95, 0.0), (0, 0.9, 0.0), (0, 0.4, 0.3), (0, 0.999, 0.0)]),
    "bfloat16, many ties": (normal(torch.bfloat16), [(20, 0.95, 0.0), (0, 0.9, 0.0), (30, 1.0, 0.1), (3, 0.7, 0.0)]),
    "float16": (normal(torch.float16, 4.0), [(20, 0.95, 0.0), (0, 0.6, 0.0)]),
    "more than there are groups": (normal(torch.float32, 2.0), [(900, 1.0, 0.0), (900, 0.5, 0.01)]),
    "one value, more often than a list holds": (torch.full((VOCAB,), 2.5), [(5, 1.0, 0.0), (0, 0.3, 0.0)]),
    "both zeros": (torch.arange(VOCAB) % 2 * -0.0, [(5, 0.9, 0.0), (0, 0.3, 0.0)]),
    "fewer than top_k": (with_few(7), [(20, 1.0, 0.0), (20, 0.5, 0.0), (4, 0.9, 0.0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_filters_draw_as_if_the_others_were_forbidden(case: str) -> None:
    """The noise of a token is a function of seed, position and token: so a row that filters draws what a row without
    filters draws from logits that have the others at -inf."""
    logits, filters = CASES[case]
    temperature, seeds = 1.5, (3, 4, 5)
    rows = [one for one in filters for _ in seeds]
    params = sampling(
        temperature=[temperature] * len(rows),
        top_k=[one[0] for one in rows],
        top_p=[one[1] for one in rows],
        min_p=[one[2] for one in rows],
        seed=[*seeds] * len(filters),
    )
    everything = sampling(temperature=[temperature] * len(rows), seed=[*seeds] * len(filters))
    allowed = torch.stack(
        [logits.masked_fill(logits < threshold(logits, temperature, *one), -torch.inf) for one in rows]
    )
    found = draw(logits.to(DEVICE).repeat(len(rows), 1), params, 9)
    assert found == draw(allowed.to(DEVICE), everything, 9)


def threshold(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that stays, by sorting."""
    order = logits.double().sort(descending=True).values
    smallest = max(
        order[min(top_k or VOCAB, VOCAB) - 1], order[0] + temperature * torch.tensor(max(min_p, 1e-30)).log()
    )
    mass = ((order - order[0]) / temperature).exp() * (order >= smallest)
    if top_p < 1:
        smallest = max(smallest, order[int((mass.cumsum(0) < top_p * mass.sum()).sum())])
    return float(smallest)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 8 tokens with a bound that a right sampler exceeds once in a million; the seed is fixed."""
    logits = torch.full((1, VOCAB), -torch.inf, device=DEVICE)
    weights = torch.tensor([8.0, 4, 4, 2, 2, 1, 1, 1])
    logits[0, 100:108] = weights.log()
    count = 800 if ON_GPU else 96
    rows = 8
    drawn: Counter[int] = Counter()
    params = sampling(seed=list(range(rows)))
    for position in range(count // rows):
        drawn.update(draw(logits.expand(rows, -1).contiguous(), params, position))
    total = sum(drawn.values())
    expected = weights / weights.sum() * total
    chi_square = sum((drawn[100 + i] - float(expected[i])) ** 2 / float(expected[i]) for i in range(8))
    assert sum(drawn[100 + i] for i in range(8)) == total
    assert chi_square < 40


def test_a_row_depends_on_nobody_else() -> None:
    logits = torch.randn(6, VOCAB, device=DEVICE) * 2
    params = sampling(temperature=[1.0, 0.0, 0.8, 1.0, 1.2, 1.0], top_p=[1, 1, 0.9, 1, 0.5, 1], seed=[1, 2, 3, 4, 5, 6])
    together = draw(logits, params, 17)
    for row in range(6):
        assert draw(logits[row : row + 1], params, 17, [row]) == [together[row]]
    reordered = draw(logits.flip(0).contiguous(), params, 17, [5, 4, 3, 2, 1, 0])
    assert reordered == together[::-1]


def test_unusable_logits_fail_alone() -> None:
    logits = torch.randn(4, VOCAB, device=DEVICE)
    expected = logits[3].argmax()
    logits[0, 17] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    assert draw(logits, sampling(temperature=[1.0, 1.0, 0.0, 0.0]), 0) == [-1, -1, -1, int(expected)]


def redraw(
    logits: torch.Tensor,
    allowed: torch.Tensor,
    params: SlotSampling,
    places: list[int],
    drawn: list[int],
    filters: bool,
) -> list[int]:
    """Draw rows `places` again for position 9; allowed: [n, V] bool."""
    count, vocab = allowed.shape
    bits = torch.zeros(count, -(-vocab // 32) * 32, dtype=torch.int64, device=DEVICE)
    bits[:, :vocab] = allowed
    words = (bits.view(count, -1, 32) << torch.arange(32, device=DEVICE)).sum(2)
    index = torch.tensor(places, device=DEVICE)
    rows = PickedRows(index, index.to(torch.int32), torch.full((count,), 9, device=DEVICE))
    out = torch.tensor(drawn, dtype=torch.int32, device=DEVICE)
    token_ids = torch.full((params.seed.shape[0], 600), -7, dtype=torch.int64, device=DEVICE)
    before = logits.clone()
    redraw_rows(logits, rows, words.to(torch.int32), params, token_ids, out, filters, pdl=ON_GPU)
    assert torch.equal(before.nan_to_num(nan=5.0), logits.nan_to_num(nan=5.0)), "log-probabilities are read from them"
    for slot, token in enumerate(drawn):
        is_mine = slot in places and token >= 0
        assert token_ids[slot, 9] == (max(int(out[slot]), 0) if is_mine else -7)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 17])
@pytest.mark.parametrize("filters", [True, False])
def test_rows_under_masks_draw_as_if_the_others_were_forbidden(vocab: int, dtype: torch.dtype, filters: bool) -> None:
    """By the same numbers; others keep their tokens, and so do rows that had failed."""
    logits = torch.randn(6, vocab, device=DEVICE).to(dtype)
    logits[1, 7] = float("nan")
    off = [1.0] * 6
    params = sampling(
        temperature=[0.0, 1.0, 0.8, 1.2, 0.7, 1.0],
        top_p=[1.0, 1.0, 0.9, 1.0, 0.95, 1.0] if filters else off,
        top_k=[0, 0, 0, 30, 900, 0] if filters else [0.0] * 6,
        seed=[1, 2, 3, 4, 5, 6],
    )
    places = [3, 0, 4, 1, 2]
    allowed = torch.rand(len(places), vocab, device=DEVICE) < 0.5
    allowed[1, int(logits[0].argmax())] = False
    alone = logits[places].masked_fill(~allowed & ~logits[places].isnan(), -torch.inf)
    expected = draw(alone, params, 9, places)
    found = redraw(logits, allowed, params, places, [11, 12, -1, 14, 15, 16], filters)
    assert [found[place] for place in places] == [
        -1 if place == 2 else one for place, one in zip(places, expected, strict=True)
    ]
    assert found[5] == 16 and found[1] == -1 and found[0] != int(logits[0].argmax())


def test_a_mask_with_more_than_a_list_holds() -> None:
    """Bisection over the whole row has to look at what the mask leaves."""
    logits = torch.full((1, VOCAB), 2.5, device=DEVICE)
    allowed = torch.arange(VOCAB, device=DEVICE)[None] % 97 > 0
    assert int(allowed.sum()) > LISTED
    params = sampling(temperature=[1.0], top_p=[0.5], seed=[4])
    (token,) = redraw(logits, allowed, params, [0], [0], True)
    assert [token] == draw(logits.masked_fill(~allowed, -torch.inf), params, 9) and token % 97 > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_sample_nothing_fails(temperature: float) -> None:
    logits = torch.randn(1, VOCAB, device=DEVICE)
    nothing = torch.zeros(1, VOCAB, dtype=torch.bool, device=DEVICE)
    for top_k in (0, 5):
        params = sampling(temperature=[temperature], top_k=[top_k])
        assert redraw(logits, nothing, params, [0], [3], True) == [-1]
