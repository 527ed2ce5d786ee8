"""Grouping of pairs, tensor-core experts and the op `experts` against plain torch in float64.

On a GPU in bfloat16 and also at the shapes of GPT-OSS and Qwen3 MoE; elsewhere the same code in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton.moe_align import MAX_SMALL_PAIRS, group_pairs
from tokenspeed.kernels.triton.moe_experts import TritonExpertKernels, TritonExperts
from tokenspeed.kernels.triton.moe_grouped import (
    ExpertMatrix,
    GroupedTile,
    combine,
    expert_matrix,
    grouped_down,
    grouped_gate_up,
)
from tokenspeed.kernels.triton.moe_mxfp4 import pack_mxfp4
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    choose,
    heuristic_plans,
    load_table,
    table_name,
)
from tokenspeed.kernels.triton.moe_widen import WideScratch, num_values, widen
from tokenspeed.moe.interface import Activation, ExpertFormat, ExpertWeights, MoeNeed, Routing
from tokenspeed.protocol.errors import CheckpointError

HOPPER = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
BOUND = 1e-2 if torch.bfloat16 == KIND else 4e-6
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SWIGLU, CLAMPED = Activation(), Activation(limit=7.0, alpha=1.702)
FORMATS: tuple[ExpertFormat, ...] = ("dense", "mxfp4", "fp8_block")


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth).norm() / truth.norm().clamp(min=1e-30))


# ---- grouping -------------------------------------------------------------------------------------------------------


def ids_like(num_tokens: int, top_k: int, num_experts: int, how: str) -> torch.Tensor:
    if how == "one":
        return torch.full((num_tokens, top_k), num_experts - 1, dtype=torch.int32, device=DEVICE)
    if how == "few":
        return torch.randint(0, max(1, num_experts // 4), (num_tokens, top_k), dtype=torch.int32, device=DEVICE)
    return torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k, dim=1).indices.to(torch.int32)


@pytest.mark.parametrize("how", ["any", "few", "one"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"),
    [
        (1, 4, 32, 16),
        (1, 1, 1, 16),
        (5, 8, 128, 16),
        (40, 4, 32, 16),
        (128, 4, 32, 64),
        (256, 4, 128, 16),
        (257, 4, 7, 16),
        (300, 8, 20, 32),
    ],
)
def test_pairs_are_grouped(num_tokens: int, top_k: int, num_experts: int, block_m: int, how: str) -> None:
    """Stable by expert, every pair in one tile of its expert, both paths."""
    ids = ids_like(num_tokens, top_k, num_experts, how)
    grouping = group_pairs(ids, num_experts, block_m, HOPPER)
    flat = ids.flatten().long().cpu()
    assert grouping.pairs.long().cpu().tolist() == torch.sort(flat, stable=True).indices.tolist()
    place = 0
    tiles = grouping.tiles.cpu().t().tolist()
    used = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[len(used) :] == [[-1, 0, 0]] * (len(tiles) - len(used))
    for expert, first, end in used:
        assert first == place
        assert first < end <= first + block_m
        assert (flat[grouping.pairs[first:end].long().cpu()] == expert).all()
        place = end
    assert place == flat.numel()
    assert len(used) == sum(-(-int(count) // block_m) for count in flat.bincount())


def test_both_paths_of_grouping_are_tested() -> None:
    assert 256 * 4 == MAX_SMALL_PAIRS < 257 * 4


# ---- weights --------------------------------------------------------------------------------------------------------


def matrix_and_truth(
    format: ExpertFormat, num_experts: int, num_rows: int, width: int, is_up: bool, has_bias: bool
) -> tuple[ExpertMatrix, torch.Tensor, torch.Tensor]:
    """A packed matrix [E, N, K], and its values and bias in float64."""
    weight, scale, bias, truth, wide_bias = stored(format, num_experts, num_rows, width, is_up, has_bias)
    if format == "mxfp4":
        assert scale is not None
        return expert_matrix(format, pack_mxfp4(weight, scale, "gate_up"), None, bias), truth, wide_bias
    return expert_matrix(format, weight, scale, bias), truth, wide_bias


def stored(
    format: ExpertFormat, num_experts: int, num_rows: int, width: int, is_up: bool, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """One matrix as `ExpertWeights` has it: weight, scale, bias; its values and bias in float64."""
    bias = torch.randn(num_experts, num_rows, device=DEVICE).to(KIND) if has_bias else None
    wide_bias = torch.zeros(num_experts, num_rows, device=DEVICE).double() if bias is None else bias.double()
    if format == "dense":
        weight = (torch.randn(num_experts, num_rows, width, device=DEVICE) * width**-0.5).to(KIND)
        return weight, None, bias, weight.double(), wide_bias
    if format == "mxfp4":
        codes = torch.randint(0, 256, (num_experts, num_rows, width // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(118, 125, (num_experts, num_rows, width // 32), dtype=torch.uint8, device=DEVICE)
        return codes, scales, bias, mxfp4_values(codes, scales), wide_bias
    weight = torch.randn(num_experts, num_rows, width, device=DEVICE).to(torch.float8_e4m3fn)
    half_rows = num_rows // 2 if is_up else num_rows
    row_blocks, column_blocks = -(-half_rows // 128), -(-width // 128)
    scale = torch.rand(num_experts, row_blocks * (2 if is_up else 1), column_blocks, device=DEVICE) * 0.1 + 0.01
    wide = scale.double().repeat_interleave(128, 2)[:, :, :width]
    parts = wide.split(row_blocks, dim=1)
    rows = [part.repeat_interleave(128, 1)[:, :half_rows] for part in parts]
    wide = torch.stack(rows, dim=2).flatten(1, 2) if is_up else rows[0]
    return weight, scale, bias, weight.double() * wide, wide_bias


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return E2M1.to(codes.device)[nibbles] * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def test_packed_mxfp4_is_exact() -> None:
    """Every code with every scale, by bits, as the kernel's plain arithmetic does it."""
    scales = torch.arange(0, 129, dtype=torch.uint8).view(1, 129, 1).repeat(1, 1, 5)
    codes = torch.arange(0, 80, dtype=torch.uint8).mul(37).expand(1, 129, 80).contiguous()
    truth = mxfp4_values(codes, scales)
    packed = pack_mxfp4(codes, scales, "w")
    w = packed.codes.view(torch.int16).view(1, 129, 5, 8).int()
    last = ((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040)
    slots = torch.stack((w & 0x81C0, (w << 3) & 0x81C0, (w << 6) & 0x81C0, last), dim=3)
    exponents = packed.scales.transpose(1, 2).contiguous().view(torch.uint8).view(1, 129, -1)[:, :, :5].int()
    factor = (exponents << 7).to(torch.int16).view(torch.bfloat16)
    values = slots.to(torch.int16).view(torch.bfloat16) * factor[..., None, None]
    assert torch.equal(values.double().flatten(2), truth)


def test_scales_that_are_too_large_are_refused() -> None:
    codes = torch.zeros(1, 2, 32, dtype=torch.uint8)
    scales = torch.full((1, 2, 2), 200, dtype=torch.uint8)
    pack_mxfp4(codes.clone(), scales, "w")  # over zeros they do not matter
    codes[0, 1, 20] = 3
    with pytest.raises(CheckpointError, match=r"w: an MXFP4 scale of 200 \(2\^73\).*128"):
        pack_mxfp4(codes, scales, "w")


# ---- the two products and the sum -----------------------------------------------------------------------------------


def truth_of(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor], activation: Activation, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if residual is None else residual.double()
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            both = up[0][e] @ x[t].double() + up[1][e]
            gate, upper = both[0::2], both[1::2]
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                upper = upper.clamp(-activation.limit, activation.limit) + 1
            h = gate * torch.sigmoid(gate * (activation.alpha if activation.limit is not None else 1.0)) * upper
            out[t] += weights[t, j].double() * (down[0][e] @ h + down[1][e])
    return out


def run_grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: ExpertMatrix, down: ExpertMatrix,
    activation: Activation, residual: torch.Tensor | None, block_m: int, tile: GroupedTile, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    grouping = group_pairs(ids, num_experts, block_m, HOPPER)
    h = grouped_gate_up(x, up, grouping, ids.shape[1], activation, tile, HOPPER)
    parts = grouped_down(h, down, grouping, weights, torch.float32, tile, HOPPER)
    return combine(parts, x.shape[0], ids.shape[1], residual, x.dtype, HOPPER)


TILES = {
    "small": (16, GroupedTile(64, 64, 1, 3, 4)),
    "split": (16, GroupedTile(128, 128, 2, 3, 4, 2, 2)),
    "large": (64, GroupedTile(128, 64, 1, 3, 8, 4)),
}


@pytest.mark.parametrize("tile_name", TILES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "inner", "how", "activation"),
    [
        (1, 1, 1, 64, 32, "any", SWIGLU),
        (3, 4, 6, 96, 96, "any", CLAMPED),
        (9, 2, 4, 160, 224, "one", CLAMPED),
        (21, 3, 5, 288, 64, "few", SWIGLU),
    ],
)
def test_grouped_experts(
    num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int, how: str,
    activation: Activation, format: ExpertFormat, tile_name: str,
) -> None:  # fmt: skip
    """The clamped activation with biases and a residual, the other without."""
    block_m, tile = TILES[tile_name]
    has_bias = activation is CLAMPED
    up, *up_truth = matrix_and_truth(format, num_experts, 2 * inner, hidden, True, has_bias)
    down, *down_truth = matrix_and_truth(format, num_experts, hidden, inner, False, has_bias)
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(KIND)
    residual = torch.randn(num_tokens, hidden, device=DEVICE).to(KIND) if has_bias else None
    ids = ids_like(num_tokens, top_k, num_experts, how)
    weights = torch.rand(num_tokens, top_k, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), activation, residual)
    out = run_grouped(x, ids, weights, up, down, activation, residual, block_m, tile, num_experts)
    assert residual is None or out is residual
    assert error(out, truth) < BOUND


# ---- the op ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every buffer that torch makes without values holds NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def kernels() -> TritonExpertKernels:
    return TritonExpertKernels(DEVICE, HOPPER, None, 227 * 1024, "a GPU without a table")


def layer(
    format: ExpertFormat, need: MoeNeed, has_bias: bool, ours: TritonExpertKernels | None = None
) -> tuple[TritonExperts, list[torch.Tensor], list[torch.Tensor]]:
    """A packed layer, and values and bias of its two matrices."""
    e, h, i = need.num_experts, need.hidden_size, need.intermediate_size
    up, up_scale, up_bias, *up_truth = stored(format, e, 2 * i, h, True, has_bias)
    down, down_scale, down_bias, *down_truth = stored(format, e, h, i, False, has_bias)
    weights = ExpertWeights(format, up, down, up_scale, down_scale, up_bias, down_bias)
    return (ours or kernels()).pack(weights, need), up_truth, down_truth


def need_of(format: ExpertFormat, e: int, k: int, h: int, i: int, has_bias: bool, activation: Activation) -> MoeNeed:
    return MoeNeed(DEVICE.type, KIND, e, k, h, i, format, has_bias, activation)


OP_SHAPES = [(6, 3, 96, 64)] + ([(32, 4, 2880, 2880), (128, 8, 2048, 768)] if ON_GPU else [])
OP_TOKENS = (0, 1, 5, 40) + ((2, 17, 64, 300, 2100) if ON_GPU else ())


@pytest.mark.parametrize("num_tokens", OP_TOKENS)
@pytest.mark.parametrize("shape", OP_SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_experts_op(format: ExpertFormat, shape: tuple[int, int, int, int], num_tokens: int, poisoned: None) -> None:
    """With and without a residual; some experts are never chosen."""
    has_bias, activation = (True, CLAMPED) if format == "mxfp4" else (False, SWIGLU)
    need = need_of(format, *shape, has_bias, activation)
    experts, up_truth, down_truth = layer(format, need, has_bias)
    x = torch.randn(num_tokens, need.hidden_size, device=DEVICE).to(KIND)
    ids = ids_like(num_tokens, need.top_k, need.num_experts - 2, "any")
    weights = torch.rand(num_tokens, need.top_k, device=DEVICE)
    residual = torch.randn(num_tokens, need.hidden_size, device=DEVICE).to(KIND)
    pairs = (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1])
    truth = truth_of(x, ids, weights, *pairs, activation, None)
    routing = Routing(ids, weights)
    assert error(experts(x, routing), truth) < BOUND
    added = residual.clone()
    assert experts(x, routing, added) is added
    assert error(added, truth + residual.double()) < BOUND


@pytest.mark.parametrize("sizes", [(6, 3, 96, 64), (5, 2, 160, 224)], ids=str)
def test_dense_weights_by_the_copy_engine(sizes: tuple[int, int, int, int]) -> None:
    """Tiles reach past an expert's rows and columns."""
    if ON_GPU and not HOPPER:
        pytest.skip("the copy engine came with Hopper")
    need = need_of("dense", *sizes, True, SWIGLU)
    experts, up_truth, down_truth = layer("dense", need, True)
    tile = GroupedTile(128, 64, 1, 3, 4, tma=True)
    experts.plans = (ExpertPlan(NO_LIMIT, False, 16, tile, tile),)
    x = torch.randn(23, need.hidden_size, device=DEVICE).to(KIND)
    ids, weights = ids_like(23, need.top_k, need.num_experts, "any"), torch.rand(23, need.top_k, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), SWIGLU, None)
    assert error(experts(x, Routing(ids, weights)), truth) < BOUND


# ---- widened MXFP4 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 8, 32), (3, 66, 96), (2, 70, 160), (2, 64, 384)], ids=str)
def test_widening_is_exact(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rows and columns that no tile divides; what lies behind in the buffer stays."""
    matrix, truth, _ = matrix_and_truth("mxfp4", *sizes, True, True)
    scratch = torch.full((num_values(matrix) + 7,), 5.0, dtype=dtype, device=DEVICE)
    wide = widen(matrix, scratch, HOPPER)
    assert wide.format == "dense" and wide.scale is None and wide.bias is matrix.bias
    assert torch.equal(wide.weight.double(), truth)
    assert wide.weight.data_ptr() == scratch.data_ptr()
    assert (scratch[num_values(matrix) :] == 5).all()


def wide_plan(block_m: int, tma: bool) -> ExpertPlan:
    up, down = GroupedTile(64, 64, 1, 3, 4, 2, tma=tma), GroupedTile(64, 32, 2, 3, 4)
    return ExpertPlan(NO_LIMIT, False, block_m, up, down, widen=True)


@pytest.mark.parametrize(
    ("num_tokens", "how", "tma"), [(0, "any", True), (1, "any", False), (40, "one", False), (33, "few", True)]
)
def test_widened_experts(num_tokens: int, how: str, tma: bool, poisoned: None) -> None:
    """Two layers in turn over one buffer, against plain torch."""
    if tma and ON_GPU and not HOPPER:
        pytest.skip("the copy engine came with Hopper")
    need = need_of("mxfp4", 5, 2, 96, 160, True, CLAMPED)
    ours = kernels()
    layers = [layer("mxfp4", need, True, ours) for _ in range(2)]
    ids, weights = ids_like(num_tokens, 2, 5, how), torch.rand(num_tokens, 2, device=DEVICE)
    x = torch.randn(num_tokens, 96, device=DEVICE).to(KIND)
    for place in (0, 1):
        experts, up_truth, down_truth = layers[place]
        experts.plans = (wide_plan(32, tma),)
        pairs = (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1])
        truth = truth_of(x, ids, weights, *pairs, CLAMPED, x)
        assert error(experts(x, Routing(ids, weights), x.clone()), truth) < BOUND


def test_layers_of_a_size_share_a_buffer() -> None:
    scratch = WideScratch()
    assert not scratch.has(64, KIND)
    one = scratch.get(64, KIND, DEVICE)
    assert scratch.has(64, KIND) and scratch.get(64, KIND, DEVICE) is one
    larger = scratch.get(96, KIND, DEVICE)
    assert larger.shape == (96,) and scratch.get(64, KIND, DEVICE) is one


@pytest.mark.skipif(not ON_GPU, reason="graphs are recorded on a GPU")
def test_a_recorded_graph_does_not_own_the_buffer() -> None:
    """Before the first widened call a graph takes the other plan, after it the widened one; both give the truth."""
    need = need_of("mxfp4", 5, 2, 96, 160, True, CLAMPED)
    experts, up_truth, down_truth = layer("mxfp4", need, True)
    tile = GroupedTile(64, 128, 1, 3, 4)
    experts.plans = (ExpertPlan(8, False, 16, tile, tile), wide_plan(32, HOPPER))
    x = torch.randn(40, 96, device=DEVICE).to(KIND)
    routing = Routing(ids_like(40, 2, 5, "any"), torch.rand(40, 2, device=DEVICE))
    pairs = (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1])
    truth = truth_of(x, routing.expert_ids, routing.weights, *pairs, CLAMPED, None)
    experts.plans, both = experts.plans[:1], experts.plans
    experts(x, routing)  # compiles
    experts.plans = both
    for has_buffer in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, routing)
        assert experts.scratch.has(num_values(experts.gate_up), KIND) == has_buffer
        graph.replay()
        assert error(out, truth) < BOUND
        experts(x, routing)


@pytest.mark.parametrize("num_tokens", [20, 40])
def test_a_row_does_not_depend_on_its_place(num_tokens: int) -> None:
    need = need_of("mxfp4", 6, 2, 96, 64, True, CLAMPED)
    experts, _, _ = layer("mxfp4", need, True)
    x = torch.randn(num_tokens, 96, device=DEVICE).to(KIND)
    ids, weights = ids_like(num_tokens, 2, 6, "any"), torch.rand(num_tokens, 2, device=DEVICE)
    order = torch.randperm(num_tokens, device=DEVICE)
    out = experts(x, Routing(ids, weights))
    moved = experts(x[order].contiguous(), Routing(ids[order].contiguous(), weights[order].contiguous()))
    assert torch.equal(out[order], moved)


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_chooses_the_tiles(format: ExpertFormat) -> None:
    shape = ExpertShape(format, 6, 3, 96, 64)
    plan = ExpertPlan(NO_LIMIT, False, 32, GroupedTile(32, 32, 1, 2, 4), GroupedTile(64, 64, 3, 2, 4))
    table = ExpertTable("a GPU", "a test", ())
    assert table.find(shape) is None
    need = need_of(format, 6, 3, 96, 64, False, SWIGLU)
    experts, up_truth, down_truth = layer(format, need, False)
    experts.plans = (plan,)
    x = torch.randn(7, 96, device=DEVICE).to(KIND)
    ids, weights = ids_like(7, 3, 6, "any"), torch.rand(7, 3, device=DEVICE)
    truth = truth_of(x, ids, weights, (up_truth[0], up_truth[1]), (down_truth[0], down_truth[1]), SWIGLU, None)
    assert error(experts(x, Routing(ids, weights)), truth) < BOUND


def test_plans_cover_every_number_of_tokens() -> None:
    for shared_bytes in (99 * 1024, 227 * 1024):
        for format in FORMATS:
            for sizes in ((32, 4, 2880, 2880), (128, 8, 2048, 768), (4, 4, 64, 64)):
                plans = heuristic_plans(ExpertShape(format, *sizes), format != "fp8_block", shared_bytes, False)
                limits = [plan.max_tokens for plan in plans]
                assert limits == sorted(set(limits)) and limits[-1] == NO_LIMIT
                assert [choose(plans, n).max_tokens for n in limits] == limits


def test_shipped_tables_can_be_read() -> None:
    assert table_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert load_table("a GPU that nobody has") is None
    folder = resources.files("tokenspeed.kernels.triton").joinpath("tables")
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.endswith(".json"):
            table = load_table(file.name.removesuffix(".json"))
            assert table is not None and table.experts
            for entry in table.experts:
                assert table.find(entry.shape) == entry.plans
                limits = [plan.max_tokens for plan in entry.plans]
                assert limits == sorted(set(limits)) and limits[-1] == NO_LIMIT
