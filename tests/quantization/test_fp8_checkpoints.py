"""Every layout of fp8 checkpoints, through the loader: logits equal those of the model with dequantized weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.model import ModelConfig, RopeConfig, read_model_config
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.fp8_weights import read_kv_scales
from tokenspeed.loader.load import load_model
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, quantize
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.kv_pool import LayerPages

CPU, F32 = torch.device("cpu"), torch.float32
FLOAT, _ = select_ops(Need(CPU, torch.float32))
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=96,
    max_position=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    dtype="float32",
)
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
TOKENS = [3, 17, 42, 5, 90, 11, 2, 63]


class ReferenceFp8Linear:
    """`ops.Fp8Linear` by plain torch, so that the kept form is served on a CPU too. Counts its calls."""

    max_fused_rows = 4

    def __init__(self) -> None:
        self.calls = 0

    def why_not(self, in_features: int, out_features: int, is_block: bool) -> str | None:
        return None

    def __call__(self, x, weight, scale, bias=None, *, norm=None, eps=0.0, residual=None, gated=False):
        self.calls += 1
        assert weight.dtype == E4M3 and scale.dtype == torch.float32
        rows, columns = weight.shape
        full = scale[:, None]
        if scale.dim() == 2:
            full = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, norm.shape, norm, eps)
        y = torch.nn.functional.linear(x, (weight.float() * full).to(x.dtype), bias)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        return y if residual is None else residual.add_(y)


def is_linear(name: str) -> bool:
    return "_proj.weight" in name


def quantized(layout: str, dense: torch.Tensor, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(suffix -> stored tensor, dequantized weight) of one linear."""
    rows, columns = dense.shape
    if layout.startswith("tensor"):
        scale = dense.abs().max() / 448 * (1 + index / 100)  # parts of a merged layer differ
        full = scale.reshape(1, 1)
        stored = {"weight_scale": scale if layout == "tensor" else scale.reshape(1)}
    elif layout == "channel":
        full = dense.abs().amax(1, keepdim=True) / 448
        stored = {"weight_scale": full}
    else:
        scale = torch.rand(-(-rows // BLOCK), columns // BLOCK) * 1e-3 + 1e-4
        full = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
        stored = {"weight_scale_inv" if layout == "block" else "weight_scale": scale}
    weight = (dense / full).clamp(-448, 448).to(E4M3)
    if layout == "tensor-static":
        stored["input_scale"] = torch.tensor([0.5])
    return {"weight": weight, **stored}, weight.float() * full


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


def compressed(strategy: str) -> dict:
    config = json.loads(json.dumps(COMPRESSED))
    weights = config["config_groups"]["group_0"]["weights"]
    weights["strategy"] = strategy
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    return {"quantization_config": config}


BLOCK_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
LAYOUTS = [
    pytest.param("tensor", {"quantization_config": {"quant_method": "fp8"}}, None, id="fp8-tensor"),
    pytest.param(
        "tensor-static",
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        None,
        id="fp8-static",
    ),
    pytest.param("channel", {"quantization_config": {"quant_method": "fp8"}}, None, id="fp8-channel"),
    pytest.param("block", {"quantization_config": BLOCK_CONFIG}, None, id="fp8-block"),
    pytest.param("channel", compressed("channel"), None, id="compressed-channel"),
    pytest.param("tensor-1", compressed("tensor"), None, id="compressed-tensor"),
    pytest.param("block-ct", compressed("block"), None, id="compressed-block"),
    pytest.param("tensor-static", {}, MODELOPT, id="modelopt"),
]


def dense_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = built(CONFIG, FLOAT)
    return {
        name: torch.randn(shape, generator=generator) * (0.08 if len(shape) == 2 else 0.1) + (len(shape) == 1)
        for name, shape in model.expected_shapes().items()
    }


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: dict, modelopt: dict | None) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **config}))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(
        name="x",
        format="safetensors",
        config_path=str(folder / "config.json"),
        weight_files=(str(folder / "model.safetensors"),),
        tokenizer_path=str(folder),
    )


def fp8_state(layout: str, keep_dense: str = "\0") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what the file holds, its dequantized twin)."""
    stored: dict[str, torch.Tensor] = {}
    twin: dict[str, torch.Tensor] = {}
    for index, (name, dense) in enumerate(dense_state().items()):
        if not is_linear(name) or keep_dense in name:
            stored[name] = twin[name] = dense
            continue
        parts, twin[name] = quantized(layout, dense, index)
        stored |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in parts.items()}
    return stored, twin


def built(config: ModelConfig, ops: Ops, quantized_to: Literal["fp8"] | None = None) -> Model:
    need = AttentionNeed("cpu", ops.dtype, config.num_heads, config.num_kv_heads, config.head_dim, 16)
    backend, _ = select_backend(need, "auto", ops)
    return build_model(config, SINGLE, scheme_for(config, ops, quantized_to), ops, backend)


@torch.inference_mode()
def logits(
    checkpoint: Checkpoint, ops: Ops, num_rows: int = len(TOKENS), quantized_to: Literal["fp8"] | None = None
) -> torch.Tensor:
    config = read_model_config(checkpoint)
    model = built(config, ops, quantized_to)
    load_model(model, checkpoint, config, progress=False)
    shape = (2, 16, config.num_kv_heads, config.head_dim)
    model.bind_kv([LayerPages(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)])
    batch = AttentionBatch(
        query_start=torch.tensor([0, num_rows], dtype=torch.int32),
        seq_lens=torch.tensor([num_rows], dtype=torch.int32),
        page_table=torch.tensor([[0]], dtype=torch.int32),
        slots=torch.arange(num_rows),
        num_requests=1,
        num_tokens=num_rows,
        query_lens_host=[num_rows],
        seq_lens_host=[num_rows],
    )
    return model.logits(model.forward(torch.tensor(TOKENS[:num_rows]), torch.arange(num_rows), batch))


@pytest.mark.parametrize(("layout", "config", "modelopt"), LAYOUTS)
def test_logits_are_those_of_the_dequantized_model(tmp_path, layout, config, modelopt):
    stored, twin = fp8_state(layout)
    (tmp_path / "fp8").mkdir()
    (tmp_path / "dense").mkdir()
    checkpoint = saved(tmp_path / "fp8", stored, config, modelopt)
    expected = logits(saved(tmp_path / "dense", twin, {}, None), FLOAT)
    torch.testing.assert_close(logits(checkpoint, FLOAT), expected, rtol=1e-4, atol=1e-4)
    op = ReferenceFp8Linear()
    for num_rows in (8, 3):  # plain and fused
        kept = logits(checkpoint, replace(FLOAT, fp8_linear=op), num_rows)
        torch.testing.assert_close(kept, expected[:num_rows], rtol=1e-4, atol=1e-4)
    assert op.calls == 2 * 2 * 4  # every linear of two layers, twice: nothing was dequantized


@pytest.mark.parametrize("layout", ["tensor", "block"])
@pytest.mark.parametrize("dense_part", ["0.self_attn.q_proj", "1.self_attn.v_proj", "1.mlp.down_proj"])
def test_a_part_that_is_not_quantized_makes_its_layer_dense(tmp_path, layout, dense_part):
    stored, twin = fp8_state(layout, dense_part)
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", f"model.layers.{dense_part}"]}
    if layout == "block":
        config["weight_block_size"] = [128, 128]
    (tmp_path / "dense").mkdir()
    checkpoint = saved(tmp_path, stored, {"quantization_config": config}, None)
    expected = logits(saved(tmp_path / "dense", twin, {}, None), FLOAT)
    op = ReferenceFp8Linear()
    got = logits(checkpoint, replace(FLOAT, fp8_linear=op))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert op.calls == 7


def test_a_dense_checkpoint_is_quantized_by_row_while_it_loads(tmp_path):
    """Layers only: the twin has the same rounded linears, and the same head and table."""
    dense = dense_state()
    twin = {name: quantize(tensor).dequantize(F32) if is_linear(name) else tensor for name, tensor in dense.items()}
    (tmp_path / "twin").mkdir()
    expected = logits(saved(tmp_path / "twin", twin, {}, None), FLOAT, 3)
    checkpoint = saved(tmp_path, dense, {}, None)
    op = ReferenceFp8Linear()
    for ops in (FLOAT, replace(FLOAT, fp8_linear=op)):
        got = logits(checkpoint, ops, 3, quantized_to="fp8")
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert op.calls == 8
    assert (logits(checkpoint, FLOAT, 3) - expected).norm() > 1e-3  # rounding shows


def test_what_a_missing_scale_is_called(tmp_path):
    for layout, config, name in (
        ("tensor", {"quant_method": "fp8"}, "model.layers.1.mlp.up_proj.weight_scale"),
        ("block", BLOCK_CONFIG, "model.layers.0.self_attn.o_proj.weight_scale_inv"),
    ):
        stored, _ = fp8_state(layout)
        del stored[name]
        checkpoint = saved(tmp_path, stored, {"quantization_config": config}, None)
        with pytest.raises(CheckpointError, match=f"its scale {name} is missing"):
            logits(checkpoint, FLOAT)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda s: s | {f"{O}.weight_scale": torch.ones(7)},
            r"o_proj.weight_scale.*shape \[7\], expected \[\] or \[1\]",
        ),
        (lambda s: s | {f"{O}.weight_scale": torch.tensor(float("nan"))}, "o_proj.weight_scale.* not finite"),
        (lambda s: s | {f"{O}.weight_scale": torch.tensor(3)}, r"o_proj.*a scale .* type I64"),
        (lambda s: s | {f"{O}.weight": torch.ones(128).to(E4M3)}, r"o_proj.weight.*shape \[128\], expected a matrix"),
        (lambda s: s | {"lm_head.weight_scale": torch.tensor(1.0)}, "unexpected tensor.*lm_head.weight_scale"),
    ],
)
def test_errors_name_the_tensor(tmp_path, change, says):
    stored, _ = fp8_state("tensor")
    checkpoint = saved(tmp_path, change(stored), {"quantization_config": {"quant_method": "fp8"}}, None)
    with pytest.raises(CheckpointError, match=says):
        logits(checkpoint, FLOAT)


O = "model.layers.0.self_attn.o_proj"  # noqa: E741


def test_e4m3_without_a_config_that_says_so_is_refused(tmp_path):
    stored, _ = fp8_state("tensor")
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale")}
    with pytest.raises(CheckpointError, match="type F8_E4M3, expected one of"):
        logits(saved(tmp_path, stored, {}, None), FLOAT)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("0.self_attn.k_scale", "0.self_attn.v_scale"), [(0.5, 0.25), (1, 1)]),
        (("1.self_attn.k_proj.k_scale", "1.self_attn.v_proj.v_scale"), [(1, 1), (0.5, 0.25)]),
        (("0.self_attn.attn.k_scale", "1.self_attn.attn.v_scale"), [(0.5, 1), (1, 0.25)]),
        (("0.self_attn.k_proj.output_scale", "0.self_attn.v_proj.output_scale"), [(0.5, 0.25), (1, 1)]),
        (("0.self_attn.kv_scale",), [(0.5, 0.5), (1, 1)]),
    ],
)
def test_scales_of_the_kv_cache_are_found_and_no_part_of_the_model(tmp_path, names, expected):
    stored = dense_state()
    plain = saved(tmp_path, stored, {}, None)
    before = logits(plain, FLOAT)
    scales = {f"model.layers.{name}": torch.tensor([value]) for name, value in zip(names, (0.5, 0.25), strict=False)}
    checkpoint = saved(tmp_path, stored | scales, {}, None)
    assert read_kv_scales(checkpoint, 2) == expected
    assert torch.equal(logits(checkpoint, FLOAT), before)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("0.self_attn.k_scale", torch.ones(4), r"shape \[4\], expected one number"),
        ("0.self_attn.v_scale", torch.tensor(0.0), "is 0.0, expected a positive number"),
        ("2.self_attn.v_scale", torch.tensor(1.0), "the model has 2 layers"),
    ],
)
def test_bad_scales_of_the_kv_cache(tmp_path, name, value, says):
    checkpoint = saved(tmp_path, {f"model.layers.{name}": value}, {}, None)
    with pytest.raises(CheckpointError, match=says):
        read_kv_scales(checkpoint, 2)


def test_config_travels_to_the_engine_process(tmp_path):
    config = read_model_config(saved(tmp_path, {"x": torch.ones(1)}, compressed("channel"), None))
    assert config.quantization is not None
    assert (config.quantization.granularity, config.quantization.activations) == ("channel", "dynamic")
    assert config.quantization.is_ignored("lm_head")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config
