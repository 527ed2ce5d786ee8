"""Which plain linears of few rows go to cuBLAS: by what was measured on one H200 (`small_linear.is_for_cublas`)."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU, randn
from torch.nn import functional

from tokenspeed.kernels.triton import registered
from tokenspeed.kernels.triton.registered import TritonLinear, _Linear
from tokenspeed.kernels.triton.small_linear import SkinnyTile, choose_tile, is_for_cublas

HEADS = {"Qwen3-8B": (151936, 4096), "gpt-oss-20b": (201088, 2880)}
QUICKER_BY_CUBLAS = [("Qwen3-8B", rows) for rows in (8, 24, 40, 64)] + [
    ("gpt-oss-20b", rows) for rows in (4, 8, 16, 24, 32)
]
QUICKER_BY_OURS = [("Qwen3-8B", 1), ("Qwen3-8B", 16), ("Qwen3-8B", 32), ("gpt-oss-20b", 1)]


@pytest.mark.parametrize(("head", "rows"), QUICKER_BY_CUBLAS)
def test_heads_that_cublas_multiplies(head: str, rows: int) -> None:
    assert is_for_cublas(rows, *HEADS[head])


@pytest.mark.parametrize(("head", "rows"), QUICKER_BY_OURS)
def test_heads_that_the_own_kernels_multiply(head: str, rows: int) -> None:
    assert not is_for_cublas(rows, *HEADS[head])


@pytest.mark.parametrize("rows", [1, 8, 16, 24, 40, 64])
def test_layers_are_never_for_cublas(rows: int) -> None:
    assert not any(is_for_cublas(rows, *shape) for shape in ((24576, 4096), (4096, 12288), (6144, 4096), (5120, 2880)))


@pytest.mark.parametrize("rows", [16, 17, 32, 33])
def test_rows_of_a_second_tile_have_tiles_of_their_own(rows: int) -> None:
    """Of Qwen3-8B's gate and up, and of down, in 16 bits; in 8 they were not measured."""
    gate_up, down = choose_tile(rows, 12288, 4096, True), choose_tile(rows, 4096, 12288, False)
    assert (gate_up == SkinnyTile(64, 64, 1, 5)) == (down == SkinnyTile(split_k=2, stages=6)) == (16 < rows < 33)
    assert choose_tile(rows, 12288, 4096, True, 1) != SkinnyTile(64, 64, 1, 5)
    assert choose_tile(rows, 4096, 12288, False, 1) != SkinnyTile(split_k=2, stages=6)


def test_the_op_asks_and_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = randn(5, 128), randn(96, 128) * 0.1
    asked: list[tuple[int, int, int]] = []
    answers = iter((True, False))

    def is_for_cublas(*shape: int) -> bool:
        asked.append(shape)
        return next(answers)

    monkeypatch.setattr(registered, "is_for_cublas", is_for_cublas)
    linear = _Linear(TritonLinear(DEVICE, pdl=ON_GPU))
    library, own = linear(x, weight, None), linear(x, weight, None)
    assert asked == [(5, 96, 128)] * 2
    assert torch.equal(library, functional.linear(x, weight))
    assert float((own - library).norm() / library.norm()) < (1e-2 if torch.bfloat16 == KIND else 2e-6)
