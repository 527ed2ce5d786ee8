"""A row of a bfloat16 linear has the same bits beside any number of other rows, whatever oneDNN's programs do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import pytest
import torch
from torch.nn import functional

from tokenspeed.kernels.cpu import row_sizes
from tokenspeed.kernels.cpu.row_sizes import SIZES, agreeing_sizes, pieces


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_threads", "has_bias"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("shape", [(1536, 576), (2432, 448), (64, 96)], ids=str)
def test_rows_do_not_depend_on_their_number(
    shape: tuple[int, int], num_threads: int, has_bias: bool, threads: None
) -> None:
    """On a CPU with AMX the first two shapes have programs that differ, in each of torch 2.11 and 2.13."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(1)
    in_features, out_features = shape
    x, weight = torch.randn(700, in_features).bfloat16(), torch.randn(out_features, in_features).bfloat16()
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    full = row_sizes.linear(x, weight, bias)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (full - exact).abs().max() < 2**-7 * exact.abs().max()
    for start, end in [*((0, size) for size in SIZES), (12, 103), (600, 700), (90, 690)]:
        assert torch.equal(row_sizes.linear(x[start:end], weight, bias), full[start:end])


def test_programs_that_disagree_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU without AMX: programs here add up in halves from 160 rows on, and in thirds at 512."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = 1 if x.shape[0] < 160 else 2 if x.shape[0] < 512 else 3
        terms = (x[:1].float() * weight.float()).t().chunk(parts)
        row = torch.stack([reduce(torch.add, part) for part in terms]).sum(dim=0)  # each sum term by term
        return row.bfloat16().expand(x.shape[0], -1)

    monkeypatch.setattr(functional, "linear", linear)
    find = agreeing_sizes.__wrapped__
    assert find(576, 200, False, torch.get_num_threads()) == (160, 192, 256, 320, 384, 448)


def test_a_place_that_matters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = real(x, weight, bias)
        if x.shape[0] == 96:
            out[95] += 1
        return out

    monkeypatch.setattr(functional, "linear", linear)
    assert 96 not in agreeing_sizes.__wrapped__(64, 96, False, torch.get_num_threads())


@pytest.mark.parametrize("sizes", [SIZES, (80,), (192, 320), (96, 160)], ids=str)
def test_pieces_cover_all_rows(sizes: tuple[int, ...]) -> None:
    for rows in range(sizes[0], 1100):
        taken = pieces(rows, sizes)
        assert all(end - start in sizes and start >= 0 for start, end in taken)
        assert {row for start, end in taken for row in range(start, end)} == set(range(rows))
    assert pieces(sizes[-1], sizes) == [(0, sizes[-1])]


def test_a_shape_without_agreement_goes_through_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than the smallest agreeing size are filled up to it."""
    monkeypatch.setattr(row_sizes, "agreeing_sizes", lambda *_: (256,))
    seen: list[int] = []
    real = functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(x.shape[0])
        return real(x, weight, bias)

    monkeypatch.setattr(functional, "linear", linear)
    x, weight = torch.randn(100, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    out = row_sizes.linear(x, weight, None)
    assert seen == [256]
    assert torch.equal(out, row_sizes.linear(functional.pad(x, (0, 0, 0, 156)), weight, None)[:100])
