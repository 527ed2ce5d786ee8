"""MXFP4 experts: the packed form, x in two parts, and the products on FP8 tensor cores, against float64.

The last run on a Hopper GPU only: Gluon has no interpreter. Triton's interpreter also cuts off where a GPU rounds to 8
bits, and knows no NaN of 8 bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from expert_layers import (
    CLAMPED,
    HOPPER,
    NO_MMA,
    SWIGLU,
    dense_truth,
    error,
    ids_like,
    layer,
    matrix_and_truth,
    mxfp4_values,
    need_of,
    summed_truth,
)
from kernel_device import DEVICE, KIND, ON_GPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenspeed.kernels.triton.moe_align import MAX_SMALL_PAIRS, group_pairs
from tokenspeed.kernels.triton.moe_grouped import combine, expert_matrix
from tokenspeed.kernels.triton.moe_mxfp4 import low_bits, pack_mxfp4
from tokenspeed.kernels.triton.moe_mxfp4 import mxfp4_values as values_of_fragments
from tokenspeed.kernels.triton.moe_mxfp4_mma import (
    MmaTile,
    SplitRows,
    group_and_split,
    hidden_scale,
    mma_down,
    mma_gate_up,
    scaled_row,
    split_rows,
    why_no_mma,
)
from tokenspeed.kernels.triton.moe_plans import MMA_PLANS, NO_LIMIT, ExpertPlan, MmaTiles
from tokenspeed.moe.interface import Activation, Routing
from tokenspeed.protocol.errors import CheckpointError

ON_HOPPER = pytest.mark.skipif(NO_MMA is not None, reason=str(NO_MMA))
BOUND = 3e-3


# ---- the packed form ------------------------------------------------------------------------------------------------


def unpacked(codes: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """By the formulas of `moe_mxfp4`, byte by byte: values float64 [E, N, K], of the padded columns too."""
    num_experts, sixteens, groups, _ = codes.shape
    row, column = torch.arange(16)[:, None], torch.arange(32)[None, :]
    at = (row // 2 * 4 + column % 16 // 4) * 16 + (row % 2 + column // 16 * 2) * 4 + column % 4
    assert sorted(at.flatten().tolist()) == list(range(512))
    bytes = codes[:, :, :, at].int()  # [E, N / 16, groups, 16, 32]
    both = torch.stack((bytes & 0x9C, (bytes << 2) & 0x8C | (bytes >> 2) & 0x10), dim=4)
    values = both.to(torch.uint8).view(torch.float8_e4m3fn).double().permute(0, 1, 3, 2, 4, 5)
    values = values.reshape(num_experts, sixteens * 16, groups * 64)
    exponents = scales.transpose(1, 2).contiguous().view(torch.uint8).double()
    factors = torch.exp2(exponents - 127).repeat_interleave(32, -1)
    return values[:, :, :width] * factors[:, :, :width]


@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 288])
def test_the_packed_form_is_exact(width: int) -> None:
    """Every code in every place with every scale; where 64 divides the columns, in the codes' own memory."""
    scales = torch.arange(0, 249, dtype=torch.uint8).repeat(4 * width).unfold(0, width // 32, width // 32)
    scales = scales[: 2 * 256].reshape(2, 256, width // 32).contiguous()
    codes = torch.randint(0, 256, (2, 256, width // 2), dtype=torch.uint8)
    truth, address = mxfp4_values(codes, scales), codes.data_ptr()
    packed = pack_mxfp4(codes, scales, "w")
    assert packed.width == width and packed.codes.is_contiguous() and packed.scales.is_contiguous()
    assert (packed.codes.data_ptr() == address) == (width % 64 == 0)
    assert torch.equal(unpacked(packed.codes, packed.scales, width), truth)


def test_experts_are_packed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.kernels.triton.moe_mxfp4.PACK_VALUES", 2 * 16 * 64)
    codes = torch.randint(0, 256, (5, 16, 32), dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, 16, 2), dtype=torch.uint8)
    truth = mxfp4_values(codes, scales)
    packed = pack_mxfp4(codes, scales, "w")
    assert torch.equal(unpacked(packed.codes, packed.scales, 64), truth)


class Largest(TorchDispatchMode):
    """Notes the most bytes of one tensor that is made, views apart."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            given = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor)]
            if out.untyped_storage().data_ptr() not in {arg.untyped_storage().data_ptr() for arg in given}:
                self.nbytes = max(self.nbytes, out.nbytes)
        return out


def test_temporary_memory_is_that_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where a scale was unusual, whole layers were looked at together, 2 GB of gpt-oss-120b."""
    values = 16 * 64
    monkeypatch.setattr("tokenspeed.kernels.triton.moe_mxfp4.PACK_VALUES", values)
    codes = torch.randint(0, 256, (16, 16, 32), dtype=torch.uint8)
    codes[9, 3, 16:] = 0x80  # a block of zeros
    scales = torch.randint(110, 125, (16, 16, 2), dtype=torch.uint8)
    scales[9, 3, 1] = 250
    truth = mxfp4_values(codes, scales)
    with Largest() as made:
        packed = pack_mxfp4(codes, scales, "w")
    assert torch.equal(unpacked(packed.codes, packed.scales, 64), truth)
    assert packed.references is not None
    assert made.nbytes <= 2 * values < codes.nbytes


def test_scales_that_are_too_large_are_refused() -> None:
    codes = torch.zeros(1, 16, 32, dtype=torch.uint8)
    scales = torch.full((1, 16, 2), 250, dtype=torch.uint8)
    packed = pack_mxfp4(codes.clone(), scales, "w")  # over zeros they do not matter
    assert not unpacked(packed.codes, packed.scales, 64).any()
    codes[0, 1, 20] = 3
    with pytest.raises(CheckpointError, match=r"w: an MXFP4 scale of 250 \(2\^123\).*248"):
        pack_mxfp4(codes, scales, "w")


@triton.jit
def _values_kernel(codes_ptr, words_ptr, values_ptr):
    fragments = tl.load(codes_ptr + tl.arange(0, 512)[None, :])
    first, second = values_of_fragments(fragments, tl.load(words_ptr + tl.arange(0, 16)), 0)
    at = values_ptr + tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 32)[None, :]
    tl.store(at, first)
    tl.store(at + 32, second)


@pytest.mark.parametrize("scale", [0, 1, 2, 118, 127, 128, 129, 247, 248])
def test_scales_from_end_to_end(scale: int) -> None:
    """All codes, by the kernels' plain arithmetic; 2 ** -128 is subnormal in float32."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 16)
    scales = torch.full((1, 16, 1), scale, dtype=torch.uint8, device=DEVICE)
    truth = mxfp4_values(codes, scales)
    packed = pack_mxfp4(codes, scales, "w")
    values = torch.empty(16, 64, device=DEVICE)
    _values_kernel[(1,)](packed.codes, packed.scales, values)
    assert torch.equal(values[:, :32].double(), truth[0])
    assert not values[:, 32:].any(), "columns that are missing"


# ---- x in two parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (3, 96), (5, 288)] + ([(64, 2880)] if ON_GPU else []))
def test_two_parts_are_x(num_rows: int, width: int) -> None:
    """On a GPU all bits of a bfloat16 down to 2^-13 of the row's largest."""
    x = (torch.randn(num_rows, width, device=DEVICE) * torch.exp2(8 * torch.randn(num_rows, width, device=DEVICE))).to(
        torch.bfloat16
    )
    x[0] *= 2.0**-60
    rows = split_rows(x.to(KIND), HOPPER)
    assert rows.inverse is not None and (torch.frexp(rows.inverse.cpu()).mantissa == 0.5).all()
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    scaled = largest / rows.inverse[:, None]
    assert ((scaled >= 128) & (scaled < 256)).all()
    joined = rows.joined(0)
    if not ON_GPU:
        assert error(joined, wide.double()) < 3e-2
        return
    is_large = wide.abs() >= largest * 2.0**-13
    assert torch.equal(joined[is_large], wide[is_large])
    assert ((joined - wide).abs() <= largest * 2.0**-20).all()
    y = wide / rows.inverse[:, None]
    assert torch.equal(rows.high.float(), y.to(torch.float8_e4m3fn).float())


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    x = torch.zeros(3, 64, device=DEVICE)
    x[1, 5], x[2, 7] = 1e-38, -3e-39
    joined = split_rows(x, HOPPER).joined(0)
    assert not joined[0].any() and joined.isfinite().all()
    assert float(joined[1, 5]) == pytest.approx(1e-38, rel=0.05)


@triton.jit
def _low_kernel(x_ptr, bits_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits_ptr + at, low_bits(tl.load(x_ptr + at)))


def lows_of(x: torch.Tensor) -> torch.Tensor:
    """Through `low_bits`, as float32; a multiple of 1024 numbers."""
    bits = torch.empty(x.shape, dtype=torch.int8, device=DEVICE)
    _low_kernel[(x.numel() // 1024,)](x.to(DEVICE), bits, BLOCK=1024)
    return bits.view(torch.float8_e5m2).float()


def test_low_parts_are_the_nearest_e5m2() -> None:
    """All float16 numbers below 2^15, of which every e5m2 has a neighbourhood: halves go away from zero."""
    size = torch.arange(0x7800, dtype=torch.int16).view(torch.float16).double()
    every = torch.arange(0x7C, dtype=torch.int8).view(torch.float8_e5m2).double()
    above = torch.searchsorted(every, size, right=False).clamp(min=1)
    low, high = every[above - 1], every[above]
    nearest = torch.where(size - low < high - size, low, high).float()
    assert torch.equal(lows_of(size.float()).cpu(), nearest)
    assert torch.equal(lows_of(-size.float()).cpu(), -nearest)
    x = torch.randn(4096) * 2.0 ** torch.randint(-8, 4, (4096,))  # bits below float16's
    assert ((lows_of(x).cpu() - x).abs() <= x.abs() * 2.0**-3 * (1 + 2.0**-7) + 2.0**-17).all()


@triton.jit
def _scaled_kernel(x_ptr, y_ptr, inverse_ptr, K: tl.constexpr):
    cols = tl.arange(0, K)
    y, inverse = scaled_row(tl.load(x_ptr + tl.program_id(0) * K + cols))
    tl.store(y_ptr + tl.program_id(0) * K + cols, y)
    tl.store(inverse_ptr + tl.program_id(0), inverse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_nan_before_it_becomes_e4m3(value: float) -> None:
    """e4m3 has a NaN and no infinity."""
    x = torch.randn(3, 64, device=DEVICE) * torch.tensor([[1e-20], [1.0], [1e20]], device=DEVICE)
    x[1, 7] = value
    y, inverse = torch.empty_like(x), torch.empty(3, device=DEVICE)
    _scaled_kernel[(3,)](x, y, inverse, K=64)
    assert y.isnan().nonzero().tolist() == [[1, 7]] and y.isfinite().sum() == 3 * 64 - 1
    for row in (0, 2):
        assert 128 <= float(y[row].abs().max()) < 256
        assert torch.equal(y[row] * inverse[row], x[row])
        assert torch.frexp(inverse[row]).mantissa == 0.5, "a power of two"


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter has no NaN of 8 bits")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x = torch.randn(3, 96, device=DEVICE).to(KIND)
    x[1, 7] = value
    joined = split_rows(x, HOPPER).joined(0)
    assert joined[1, 7].isnan() and joined[0].isfinite().all() and joined[2].isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 40, 257])
def test_grouping_beside_the_split(num_tokens: int, poisoned: None) -> None:
    """The same as either alone, in one launch and in several."""
    assert 40 * 4 <= MAX_SMALL_PAIRS < 257 * 4
    x, ids = torch.randn(num_tokens, 96, device=DEVICE).to(KIND), ids_like(num_tokens, 4, 32, "any")
    grouping, rows = group_and_split(x, ids, 32, 8, HOPPER)
    alone, split = group_pairs(ids, 32, 8, HOPPER), split_rows(x, HOPPER)
    assert torch.equal(grouping.pairs, alone.pairs) and torch.equal(grouping.tiles, alone.tiles)
    assert torch.equal(rows.joined(0), split.joined(0))
    assert rows.inverse is not None and split.inverse is not None and torch.equal(rows.inverse, split.inverse)


def test_the_scale_of_h_is_known_only_with_a_limit() -> None:
    assert hidden_scale(CLAMPED) == 8  # 7 (7 + 1) 8 = 448, the largest e4m3
    assert hidden_scale(Activation(1.0, 1.702)) == 128
    for activation in (SWIGLU, Activation(21.0, 1.702), Activation(7.0, 0.1)):
        assert hidden_scale(activation) == 0


def test_only_hopper_has_these_tensor_cores() -> None:
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert "compute capability 9.0" in str(why_no_mma(capability))
    assert "compute capability 9.0" in str(why_no_mma((9, 0), is_cuda=False))


# ---- the products ---------------------------------------------------------------------------------------------------


SHAPES = [(6, 3, 96, 64), (5, 2, 160, 224), (3, 3, 32, 32), (8, 4, 288, 1024), (32, 4, 2880, 2880)]
"""experts, top k, hidden, intermediate"""
TILES = {
    "unrolled": MmaTile(64, 1, 4, 4, True, 4),
    "unrolled, deep, split": MmaTile(64, 1, 6, 4, True, 4, 2),
    "two chunks": MmaTile(64, 2, 3, 4, True, 4, 3),
    "loop": MmaTile(64, 1, 4, 4, False, 4, 1, 2),
    "two at once": MmaTile(128, 1, 3, 4, True, 2),
    "eight warps": MmaTile(128, 1, 3, 8, False, 2, 2, 4),
    "one at once": MmaTile(64, 1, 3, 4, False, 1, 1, 2),
}


def check_products(
    shape: tuple[int, int, int, int], num_tokens: int, how: str, block_m: int, tile: MmaTile, activation: Activation
) -> None:
    """h and the sum against float64."""
    num_experts, top_k, hidden, inner = shape
    has_bias = activation is not SWIGLU
    up, *up_truth = matrix_and_truth("mxfp4", num_experts, 2 * inner, hidden, True, has_bias)
    down, *down_truth = matrix_and_truth("mxfp4", num_experts, hidden, inner, False, has_bias)
    x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
    ids, weights = ids_like(num_tokens, top_k, num_experts, how), torch.rand(num_tokens, top_k, device=DEVICE)
    truth = dense_truth(x, ids, (up_truth[0], up_truth[1]), activation)
    grouping, rows = group_and_split(x, ids, num_experts, block_m)
    h = mma_gate_up(rows, up, grouping, top_k, activation, tile)
    assert error(h.joined(hidden_scale(activation)), truth.flatten(0, 1)[grouping.pairs.long()]) < BOUND
    parts = mma_down(h, down, grouping, weights, activation, torch.float32, tile)
    assert parts.shape == (tile.split_k, num_tokens * top_k, hidden)
    out = combine(parts, num_tokens, top_k, None, torch.float32)
    assert error(out, summed_truth(truth, ids, weights, (down_truth[0], down_truth[1]))) < BOUND


@ON_HOPPER
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
@pytest.mark.parametrize("tile_name", TILES)
def test_products_of_small_layers(tile_name: str, block_m: int, poisoned: None) -> None:
    """Rows and columns that no tile divides, biases, experts with no pair and with several tiles."""
    shape = SHAPES[(list(TILES).index(tile_name) + block_m.bit_length()) % 4]  # each with each is minutes of compiling
    check_products(shape, 37, "few" if block_m == 8 else "any", block_m, TILES[tile_name], CLAMPED)


@ON_HOPPER
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 33, 300, 1024])
@pytest.mark.parametrize("activation", [CLAMPED, SWIGLU, Activation(2.0, 1.702)], ids=["clamped", "swiglu", "limit 2"])
def test_products_of_gpt_oss(activation: Activation, num_tokens: int) -> None:
    block_m = 8 if num_tokens <= 33 else 32 if num_tokens <= 300 else 64
    check_products(SHAPES[-1], num_tokens, "any", block_m, MmaTile(128, 1, 3, 4, False, 2), activation)


@ON_HOPPER
@pytest.mark.parametrize("place", range(len(MMA_PLANS)))
def test_tiles_of_the_plans(place: int) -> None:
    """Each at its own count, as the op runs them."""
    num_tokens, _, block_m, tiles = MMA_PLANS[place]
    need = need_of("mxfp4", *SHAPES[-1], True, CLAMPED)
    experts, up_truth, down_truth = layer("mxfp4", need, True)
    experts.plans = (ExpertPlan(NO_LIMIT, block_m=block_m, mma=tiles),)
    x = torch.randn(num_tokens, need.hidden_size, device=DEVICE).bfloat16()
    ids, weights = ids_like(num_tokens, 4, 32, "any"), torch.rand(num_tokens, 4, device=DEVICE)
    h = dense_truth(x, ids, (up_truth[0], up_truth[1]), CLAMPED)
    truth = summed_truth(h, ids, weights, (down_truth[0], down_truth[1]))
    assert error(experts(x, Routing(ids, weights)), truth) < BOUND


@ON_HOPPER
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", [CLAMPED, SWIGLU], ids=["clamped", "swiglu"])
def test_a_row_that_is_not_finite_stays_so_alone(activation: Activation, value: float) -> None:
    """One number makes all of its row's results NaN or infinite, and changes no bit of another row's."""
    need = need_of("mxfp4", 6, 2, 160, 96, True, activation)
    experts, _, _ = layer("mxfp4", need, True)
    tile = MmaTile(64, 1, 4, 4, True, 4)
    experts.plans = (ExpertPlan(NO_LIMIT, block_m=8, mma=MmaTiles(tile, tile)),)
    x = torch.randn(9, 160, device=DEVICE).bfloat16()
    routing = Routing(ids_like(9, 2, 6, "any"), torch.rand(9, 2, device=DEVICE) + 0.1)
    before = experts(x, routing)
    bad = x.clone()
    bad[4, 33] = value
    after = experts(bad, routing)
    others = torch.arange(9, device=DEVICE) != 4
    assert before.isfinite().all() and torch.equal(after[others], before[others])
    assert not after[4].isfinite().any()


@ON_HOPPER
def test_every_column_of_h_is_multiplied_by_its_own() -> None:
    """Single ones in either part give columns of the matrix, exactly.

    The low part of every first pair of four was garbage when the compiler converted to e5m2."""
    num_experts, hidden, inner = 2, 96, 288
    scale = hidden_scale(CLAMPED)
    codes = torch.randint(0, 256, (num_experts, hidden, inner // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(118, 125, (num_experts, hidden, inner // 32), dtype=torch.uint8, device=DEVICE)
    truth = mxfp4_values(codes, scales)
    matrix = expert_matrix("mxfp4", pack_mxfp4(codes, scales, "down"), None, None)
    ids = (torch.arange(inner, device=DEVICE, dtype=torch.int32) % num_experts)[:, None].contiguous()
    grouping = group_pairs(ids, num_experts, 16)
    hot = (torch.eye(inner, device=DEVICE) * scale)[grouping.pairs.long()]
    nothing = torch.zeros_like(hot)
    for high, low in ((hot, nothing), (nothing, hot)):
        rows = SplitRows(high.to(torch.float8_e4m3fn), low.to(torch.float8_e5m2), None)
        weights = torch.ones(inner, 1, device=DEVICE)
        parts = mma_down(rows, matrix, grouping, weights, CLAMPED, torch.float32, TILES["unrolled"])
        assert torch.equal(parts[0].double(), truth[ids[:, 0].long(), :, torch.arange(inner, device=DEVICE)])


def test_a_layer_without_these_tensor_cores_takes_the_other_way() -> None:
    """Off a Hopper GPU, and for float32 on it."""
    need = need_of("mxfp4", 6, 2, 96, 64, True, CLAMPED)
    experts, _, _ = layer("mxfp4", need, True)
    has_mma = NO_MMA is None and torch.bfloat16 == KIND
    assert (experts.plans[0].mma is not None) == has_mma
    assert has_mma or all(plan.mma is None for plan in experts.plans)
