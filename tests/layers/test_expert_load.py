"""Experts from every layout of a checkpoint, whole and cut over tensor-parallel ranks, dense, MXFP4 and fp8."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.config.model import ModelConfig, MoeConfig
from tokenspeed.config.moe import Layout
from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.reference import mxfp4
from tokenspeed.kernels.reference.moe import ExpertReader, LoopedExperts
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.layers.expert_weights import ExpertLoad
from tokenspeed.layers.moe import SparseMLP
from tokenspeed.models.qwen3_moe import EXAMPLE
from tokenspeed.moe.dispatch import LocalDispatch
from tokenspeed.moe.interface import Activation, ExpertFormat, ExpertWeights, Routing
from tokenspeed.moe.select import SelectedMoe, moe_need
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization.fp8 import Fp8
from tokenspeed.quantization.fp8_format import Fp8Tensor, quantize_blocks
from tokenspeed.quantization.interface import CPU, Scheme
from tokenspeed.quantization.unquantized import Unquantized

E, H, INNER = 3, 64, 256
OPS, _ = select_ops(Need(CPU, torch.float32))
RANKS = [Mesh(tp=Axis(rank, 2)) for rank in range(2)]


class Fp8Weight(MemoryWeight):
    """An `Fp8Source`, too."""

    def fp8(self, device: torch.device) -> Fp8Tensor:
        return quantize_blocks(self.tensor)


def moe_of(layout: Layout, bias: bool = False) -> MoeConfig:
    return MoeConfig(num_experts=E, top_k=2, intermediate_size=INNER, layout=layout, expert_bias=bias)


def load_of(moe: MoeConfig, mesh: Mesh, scheme: Scheme) -> ExpertLoad:
    config: ModelConfig = msgspec.structs.replace(EXAMPLE, moe=moe, hidden_size=H)
    return ExpertLoad(moe, mesh, moe_need(config, mesh, scheme.expert_format, OPS), scheme, OPS, "m.experts")


def scheme_of(format: ExpertFormat) -> Scheme:
    if format == "fp8_block":
        return Fp8(OPS, None)
    return Unquantized(OPS, "", format)


GATE, UP, DOWN = (
    torch.randn(size, generator=torch.Generator().manual_seed(seed))
    for seed, size in enumerate([(E, INNER, H), (E, INNER, H), (E, H, INNER)])
)
INTERLEAVED = torch.stack((GATE, UP), 2).view(E, 2 * INNER, H)
BIASES = torch.randn(E, 2 * INNER), torch.randn(E, H)


def stored(layout: Layout) -> dict[str, torch.Tensor]:
    """What a checkpoint of this layout has."""
    if layout == "per_expert":
        parts = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
        return {f"m.experts.{e}.{part}.weight": t[e] for part, t in parts.items() for e in range(E)}
    if layout == "fused":
        return {"m.experts.gate_up_proj": torch.cat((GATE, UP), 1), "m.experts.down_proj": DOWN}
    return {
        "m.experts.gate_up_proj": INTERLEAVED.transpose(1, 2),
        "m.experts.down_proj": DOWN.transpose(1, 2),
        "m.experts.gate_up_proj_bias": BIASES[0],
        "m.experts.down_proj_bias": BIASES[1],
    }


def stored_mxfp4() -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in stored("interleaved").items() if name.endswith("bias")}
    for part, dense in (("gate_up_proj", INTERLEAVED), ("down_proj", DOWN)):
        packed, scales = mxfp4.quantize(dense)
        tensors[f"m.experts.{part}_blocks"] = packed.view(*scales.shape, 16)
        tensors[f"m.experts.{part}_scales"] = scales
    return tensors


def filled(
    load: ExpertLoad, tensors: dict[str, torch.Tensor], kind: type[MemoryWeight] = MemoryWeight
) -> ExpertWeights:
    entries = load.entries()
    assert entries.keys() == tensors.keys()
    for name, entry in entries.items():
        assert entry.shape == tuple(tensors[name].shape)
        assert entry.is_raw == (tensors[name].dtype == torch.uint8)
        entry.load(kind(name, tensors[name]))
    return load.take()


@pytest.mark.parametrize("layout", ["per_expert", "fused", "interleaved"])
def test_every_layout_gives_one_order(layout: Layout) -> None:
    weights = filled(load_of(moe_of(layout, layout == "interleaved"), SINGLE, scheme_of("dense")), stored(layout))
    assert weights.format == "dense"
    assert torch.equal(weights.gate_up, INTERLEAVED) and torch.equal(weights.down, DOWN)
    assert (weights.gate_up_bias is not None) == (layout == "interleaved")


def test_mxfp4_bytes_stay_as_they_are() -> None:
    tensors = stored_mxfp4()
    weights = filled(load_of(moe_of("interleaved", True), SINGLE, scheme_of("mxfp4")), tensors)
    assert torch.equal(weights.gate_up, tensors["m.experts.gate_up_proj_blocks"].view(E, 2 * INNER, H // 2))
    assert weights.gate_up.dtype == weights.down.dtype == torch.uint8
    for expert in range(E):
        gate_up, down = dense_expert(weights, expert)
        assert (gate_up - INTERLEAVED[expert]).norm() < 0.2 * gate_up.norm()
        assert (down - DOWN[expert]).norm() < 0.2 * down.norm()


@pytest.mark.parametrize("layout", ["per_expert", "fused", "interleaved"])
def test_fp8_made_while_loading(layout: Layout) -> None:
    """`--quantization fp8`: each matrix by blocks of 128 x 128, gate and up apart."""
    weights = filled(load_of(moe_of(layout, layout == "interleaved"), SINGLE, scheme_of("fp8_block")), stored(layout))
    check_fp8(weights)


def check_fp8(weights: ExpertWeights) -> None:
    assert weights.gate_up_scale is not None and weights.down_scale is not None
    assert tuple(weights.gate_up_scale.shape) == (E, 4, 1) and tuple(weights.down_scale.shape) == (E, 1, 2)
    for expert in range(E):
        gate_up, down = dense_expert(weights, expert)
        assert torch.equal(gate_up[0::2], quantize_blocks(GATE[expert]).dequantize(torch.float32))
        assert torch.equal(gate_up[1::2], quantize_blocks(UP[expert]).dequantize(torch.float32))
        assert torch.equal(down, quantize_blocks(DOWN[expert]).dequantize(torch.float32))


def fp8_checkpoint() -> Scheme:
    from tokenspeed.config.quantization import QuantizationConfig

    return Fp8(OPS, QuantizationConfig(method="fp8", granularity="block", activations="dynamic"))


def test_fp8_checkpoint() -> None:
    check_fp8(filled(load_of(moe_of("per_expert"), SINGLE, fp8_checkpoint()), stored("per_expert"), Fp8Weight))


def test_a_dense_expert_in_an_fp8_checkpoint_is_refused() -> None:
    load = load_of(moe_of("per_expert"), SINGLE, fp8_checkpoint())
    name = "m.experts.1.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} is not e4m3"):
        load.entries()[name].load(MemoryWeight(name, UP[1]))


def dense_expert(weights: ExpertWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    reader = ExpertReader(weights, torch.float32)
    return reader.gate_up(expert, 0, weights.gate_up.shape[1]), reader.down(expert, 0, weights.down.shape[1])


def run(weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    routing = Routing(torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.tensor([[0.3, 0.7], [0.6, 0.4]]))
    return LoopedExperts(weights, Activation(7.0, 1.702), torch.float32)(x, routing)


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("per_expert", "dense"),
        ("fused", "dense"),
        ("interleaved", "dense"),
        ("interleaved", "mxfp4"),
        ("fused", "fp8_block"),
    ],
)
def test_the_sum_over_ranks_is_the_whole(layout: Layout, format: ExpertFormat) -> None:
    """Each rank has half of the intermediate columns; the down bias comes once."""
    moe = moe_of(layout, layout == "interleaved")
    tensors = stored_mxfp4() if format == "mxfp4" else stored(layout)
    x = torch.randn(2, H)
    whole = filled(load_of(moe, SINGLE, scheme_of(format)), tensors)
    parts = [filled(load_of(moe, mesh, scheme_of(format)), tensors) for mesh in RANKS]
    for part in parts:
        assert part.gate_up.shape[1] == INNER and part.gate_up.is_contiguous() and part.down.is_contiguous()
    assert torch.allclose(run(parts[0], x) + run(parts[1], x), run(whole, x), rtol=1e-4, atol=1e-4)


def test_ranks_that_would_cut_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="columns 0 to 64 of 256, which cuts the scales of 128 values"):
        load_of(moe_of("fused"), Mesh(tp=Axis(0, 4)), scheme_of("fp8_block"))
    with pytest.raises(ConfigError, match="columns 0 to 16 of 256, which cuts the scales of 32 values"):
        load_of(moe_of("interleaved", True), Mesh(tp=Axis(0, 16)), scheme_of("mxfp4"))


def test_mxfp4_needs_whole_groups() -> None:
    moe = msgspec.structs.replace(moe_of("interleaved", True), intermediate_size=250)
    with pytest.raises(CheckpointError, match="intermediate_size is 250, MXFP4 needs a multiple of 32"):
        load_of(moe, SINGLE, scheme_of("mxfp4"))


def test_what_never_came_is_named() -> None:
    load = load_of(moe_of("per_expert"), SINGLE, scheme_of("dense"))
    for name, entry in load.entries().items():
        if name != "m.experts.2.down_proj.weight":
            entry.load(MemoryWeight(name, stored("per_expert")[name]))
    with pytest.raises(CheckpointError, match=r"^m.experts.2.down_proj.weight was not in the checkpoint"):
        load.take()


def test_a_wrong_shape_is_refused_by_name() -> None:
    entries: dict[str, Any] = load_of(moe_of("fused"), SINGLE, scheme_of("dense")).entries()
    with pytest.raises(CheckpointError, match=r"m.experts.down_proj: shape \[3, 64, 255\], expected \[3, 64, 256\]"):
        entries["m.experts.down_proj"].load(MemoryWeight("m.experts.down_proj", DOWN[:, :, 1:]))


def test_scales_that_are_no_numbers_are_refused_by_tensor() -> None:
    """The bug: damaged MXFP4 scales (255 is NaN, 253 overflows) were served, and every request ended in NaN logits."""
    load = load_of(moe_of("interleaved"), SINGLE, scheme_of("mxfp4"))
    name = "m.experts.gate_up_proj_scales"
    entry = load.entries()[name]
    scales = torch.full(entry.shape, 252, dtype=torch.uint8)
    entry.load(MemoryWeight(name, scales))
    scales[1, 5, 0] = 253
    with pytest.raises(CheckpointError, match=r"^memory: m.experts.gate_up_proj_scales: holds the scale 253"):
        entry.load(MemoryWeight(name, scales))


def test_what_a_backend_does_not_take_is_named() -> None:
    """The bug: a scale that the Triton kernels do not take was 'gate_up of an expert', of no layer."""

    class Refusing:
        def pack(self, *_: Any) -> Any:
            raise CheckpointError("gate_up: an MXFP4 scale of 140")

    config = msgspec.structs.replace(EXAMPLE, moe=moe_of("interleaved"), hidden_size=H)
    need = moe_need(config, SINGLE, "mxfp4", OPS)
    selected = SelectedMoe(Refusing(), need)
    layer = SparseMLP(config, SINGLE, scheme_of("mxfp4"), OPS, selected, LocalDispatch(SINGLE), "model.layers.3.mlp")
    tensors = {name: torch.zeros(entry.shape) for name, entry in layer.entries().items()}
    for name, entry in layer.entries().items():
        entry.load(MemoryWeight(name, tensors[name]))
    with pytest.raises(CheckpointError, match=r"^model.layers.3.mlp.experts: gate_up: an MXFP4 scale of 140"):
        layer.finish()
