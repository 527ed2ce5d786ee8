"""Triton's linear over e4m3 weights against float64, on a GPU, or small and in the interpreter where there is none."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton import fp8_linear
from tokenspeed.kernels.triton.fp8_linear import dequantize_blocks, fused_fp8_linear, quantize_rows
from tokenspeed.kernels.triton.gpu import Workspace
from tokenspeed.kernels.triton.small_linear import GemvTile, SkinnyTile, make_workspace

E4M3 = torch.float8_e4m3fn
TILES = [
    pytest.param(1, GemvTile(32, 256, 4), id="gemv"),
    pytest.param(1, GemvTile(16, 1024, 4), id="gemv-one-step"),
    pytest.param(3, SkinnyTile(block_n=64, block_k=128, split_k=1, stages=2), id="skinny"),
]


def weights(num_out: int, width: int, scales: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An e4m3 weight with its scale and its values in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(num_out, width, generator=generator) * 60).to(E4M3)
    if scales == "row":
        scale = torch.rand(num_out, generator=generator) * 1e-3 + 1e-4
        full = scale[:, None]
    else:
        scale = torch.rand(-(-num_out // 128), width // 128, generator=generator) * 1e-3 + 1e-4
        full = scale.repeat_interleave(128, 0)[:num_out].repeat_interleave(128, 1)
    return weight.to(DEVICE), scale.to(DEVICE), (weight.double() * full).to(DEVICE)


def workspace() -> Workspace:
    return make_workspace(DEVICE)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(("num_rows", "tile"), TILES)
def test_linear_with_bias_and_residual(num_rows: int, tile: GemvTile | SkinnyTile, scales: str) -> None:
    weight, scale, dense = weights(192, 512, scales)
    x = torch.randn(num_rows, 512, dtype=KIND, device=DEVICE)
    bias = torch.randn(192, dtype=KIND, device=DEVICE)
    residual = torch.randn(num_rows, 192, dtype=KIND, device=DEVICE)
    expected = x.double() @ dense.t() + bias.double() + residual.double()
    got = fused_fp8_linear(x, weight, scale, workspace(), bias, residual=residual, tile=tile, pdl=ON_GPU)
    assert got is residual
    assert error(got, expected) < 4e-3


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(("num_rows", "tile"), TILES)
def test_norm_and_gate(num_rows: int, tile: GemvTile | SkinnyTile, scales: str) -> None:
    weight, scale, dense = weights(256, 512, scales, seed=1)
    x = torch.randn(num_rows, 512, dtype=KIND, device=DEVICE)
    norm = torch.rand(512, dtype=KIND, device=DEVICE) + 0.5
    bias = torch.randn(256, dtype=KIND, device=DEVICE)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    gate, up = (normed @ dense.t() + bias.double()).chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    got = fused_fp8_linear(x, weight, scale, workspace(), bias, norm, 1e-6, gated=True, tile=tile, pdl=ON_GPU)
    assert got.shape == (num_rows, 128)
    assert error(got, expected) < 8e-3


@pytest.mark.parametrize("scales", ["row", "block"])
def test_split_k_adds_the_parts_once_and_leaves_zero_counters(scales: str) -> None:
    weight, scale, dense = weights(192, 512, scales, seed=2)
    scratch = workspace()
    x = torch.randn(2, 512, dtype=KIND, device=DEVICE)
    for _ in range(2):
        got = fused_fp8_linear(x, weight, scale, scratch, tile=SkinnyTile(split_k=2, stages=2), pdl=ON_GPU)
        assert error(got, x.double() @ dense.t()) < 4e-3
    assert not scratch.counters.any()


def test_every_e4m3_value_is_widened_exactly() -> None:
    """Subnormals and both zeros included; each row of the weight holds one value in its first column."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    weight = torch.zeros(256, 64, dtype=torch.uint8)
    for column in range(4):  # each byte of a word
        weight.zero_()
        weight[: len(codes), column] = codes
        x = torch.zeros(1, 64, dtype=KIND, device=DEVICE)
        x[0, column] = 1.0
        ones = torch.ones(256, device=DEVICE)
        got = fused_fp8_linear(x, weight.view(E4M3).to(DEVICE), ones, workspace(), tile=GemvTile(64, 64, 1), pdl=ON_GPU)
        assert torch.equal(got[0, : len(codes)].float().cpu(), codes.view(E4M3).float())


@pytest.mark.parametrize("num_rows", [1, 17, 64])
@pytest.mark.parametrize("width", [320, 384])
def test_the_tile_chosen_for_a_shape_serves_it(num_rows: int, width: int) -> None:
    weight, scale, dense = weights(80, width, "row", seed=3)
    x = torch.randn(num_rows, width, dtype=KIND, device=DEVICE)
    got = fused_fp8_linear(x, weight, scale, workspace(), pdl=ON_GPU)
    assert error(got, x.double() @ dense.t()) < 4e-3


def test_quantized_rows_reach_448_and_come_back() -> None:
    x = torch.randn(5, 200, dtype=KIND, device=DEVICE)
    x[2] = 0
    x[3] *= 1e4
    q, scale = quantize_rows(x, pdl=ON_GPU)
    expected = x.float().abs().amax(1, keepdim=True) / 448
    expected[2] = 1e-12
    torch.testing.assert_close(scale, expected)
    assert q.float().abs().amax(1).tolist() == [448, 448, 0, 448, 448]
    back = q.float() * scale
    assert error(back, x.double()) < (0.04 if ON_GPU else 0.1)  # the interpreter cuts digits off, without rounding


def test_blocks_are_dequantized() -> None:
    weight, scale, dense = weights(200, 256, "block", seed=4)
    got = dequantize_blocks(weight, scale, KIND)
    assert torch.equal(got, dense.float().to(KIND))


@pytest.mark.skipif(not ON_GPU, reason="torch has no row-scaled fp8 matmul on a CPU")
@pytest.mark.parametrize("scales", ["row", "block"])
def test_many_rows(scales: str) -> None:
    weight, scale, dense = weights(512, 1024, scales, seed=5)
    x = torch.randn(200, 1024, dtype=KIND, device=DEVICE)
    bias = torch.randn(512, dtype=KIND, device=DEVICE)
    got = fp8_linear.TritonFp8Linear(DEVICE, True)(x, weight, scale, bias)
    assert error(got, x.double() @ dense.t() + bias.double()) < (0.04 if scales == "row" else 4e-3)


@pytest.mark.skipif(not ON_GPU, reason="torch has no row-scaled fp8 matmul on a CPU")
@pytest.mark.parametrize("num_rows", [2, 16, 64, 200])
def test_several_rows_with_norm_gate_and_residual(num_rows: int) -> None:
    """What the fused kernel does for one row, in launches of their own."""
    weight, scale, dense = weights(512, 1024, "row", seed=6)
    x = torch.randn(num_rows, 1024, dtype=KIND, device=DEVICE)
    norm = torch.rand(1024, dtype=KIND, device=DEVICE) + 0.5
    residual = torch.randn(num_rows, 256, dtype=KIND, device=DEVICE)
    normed = x.double() * torch.rsqrt((x.double() ** 2).mean(1, keepdim=True) + 1e-6) * norm.double()
    gate, up = (normed @ dense.t()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up + residual.double()
    op = fp8_linear.TritonFp8Linear(DEVICE, True)
    got = op(x, weight, scale, norm=norm, eps=1e-6, residual=residual, gated=True)
    assert got is residual
    assert error(got, expected) < 0.06


@pytest.mark.parametrize(
    ("in_features", "out_features", "is_block", "says"),
    [(192, 64, True, "block of 128"), (100, 64, False, "multiple of 64"), (64, 24, False, "multiple of 16")],
)
def test_shapes_that_are_not_served_are_named(in_features: int, out_features: int, is_block: bool, says: str) -> None:
    op = fp8_linear.TritonFp8Linear(DEVICE, False)
    reason = op.why_not(in_features, out_features, is_block)
    assert reason is not None and says in reason
