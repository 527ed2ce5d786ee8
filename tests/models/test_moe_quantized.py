"""Quantized experts through the loader: logits equal those of transformers with the dequantized weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import Engine, build_unloaded, with_pool
from moe_families import gpt_oss, qwen3_moe
from safetensors.torch import save_file
from test_families import error, hf_logits, tokens
from transformers import PreTrainedModel

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.loader.dummy_quantized import DummyBytes
from tokenspeed.loader.load import load_model, open_weights
from tokenspeed.quantization.fp8_format import Fp8Tensor, quantize, quantize_blocks

CPU = torch.device("cpu")
BLOCK_FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(4))],
}  # fmt: skip
CHANNEL_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def wide_qwen() -> PreTrainedModel:
    """Experts of more than one block in each direction, the last ones not whole."""
    return qwen3_moe(hidden_size=160, moe_intermediate_size=192, intermediate_size=144, num_experts=4)[0]


def quantized(hf: PreTrainedModel, folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    """Saves the model in e4m3, expert by expert, and returns it with the dequantized weights."""
    by_block = config["quant_method"] == "fp8"
    hf.save_pretrained(folder)
    result = copy.deepcopy(hf)
    named = dict(result.named_parameters())
    stored: dict[str, torch.Tensor] = {}

    def keep(name: str, dense: torch.Tensor) -> torch.Tensor:
        made: Fp8Tensor = quantize_blocks(dense) if by_block else quantize(dense)
        stored[f"{name}.weight"] = made.weight
        stored[f"{name}.weight_scale_inv" if by_block else f"{name}.weight_scale"] = made.scale
        return made.dequantize(torch.float32)

    with torch.no_grad():
        for name, tensor in named.items():
            module = name.removesuffix(".weight")
            if name.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                    parent = f"{name.removesuffix('.gate_up_proj')}.{e}"
                    tensor[e] = torch.cat([keep(f"{parent}.gate_proj", gate), keep(f"{parent}.up_proj", up)])
            elif name.endswith("experts.down_proj"):
                for e, matrix in enumerate(tensor):
                    tensor[e] = keep(f"{name.removesuffix('.down_proj')}.{e}.down_proj", matrix)
            elif module.endswith("_proj"):
                tensor.copy_(keep(module, tensor))
            else:
                stored[name] = tensor.detach().clone()
    save_file(stored, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    return result


def loaded(folder: Path, quantize: Any = None) -> Engine:
    checkpoint = resolve_checkpoint(str(folder))
    config = read_model_config(checkpoint)
    model = build_unloaded(config, 4, quantize=quantize)
    load_model(model, checkpoint, config, progress=False)
    return with_pool(model, config, 4, 64, torch.float32)


@pytest.mark.parametrize("config", [BLOCK_FP8, CHANNEL_FP8], ids=["block", "channel"])
def test_fp8_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    hf = wide_qwen()
    truth = quantized(hf, tmp_path, config)
    ids = tokens(37)
    assert error(hf_logits(hf, ids), hf_logits(truth, ids)) > 1e-3, "quantization changed nothing"
    ours = loaded(tmp_path)
    assert error(ours.step([(ours.add(ids, 40), 37)])[0], hf_logits(truth, ids)) < 2e-5


@pytest.mark.parametrize("layout", ["one by one", "together"])
def test_fp8_made_while_loading(layout: str, tmp_path: Path) -> None:
    """`--quantization fp8`: experts by blocks, linears by rows; router, table and head stay as they are."""
    hf = wide_qwen()
    hf.save_pretrained(tmp_path, save_original_format=layout == "one by one")
    truth = copy.deepcopy(hf)
    with torch.no_grad():
        for name, tensor in truth.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                for matrix in tensor:
                    parts = [quantize_blocks(part).dequantize(torch.float32) for part in matrix.chunk(2)]
                    matrix.copy_(torch.cat(parts))
            elif name.endswith("experts.down_proj"):
                for matrix in tensor:
                    matrix.copy_(quantize_blocks(matrix).dequantize(torch.float32))
            elif name.endswith("_proj.weight"):
                tensor.copy_(quantize(tensor).dequantize(torch.float32))
    ours, ids = loaded(tmp_path, quantize="fp8"), tokens(37)
    assert error(ours.step([(ours.add(ids, 40), 37)])[0], hf_logits(truth, ids)) < 2e-5


def test_dummy_mxfp4(tmp_path: Path) -> None:
    """Random bytes with scales of a narrow range; equal seeds give equal models."""
    hf, _ = gpt_oss()
    values = hf.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "float32"}
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    checkpoint = resolve_checkpoint(str(tmp_path), load_format="dummy")
    ids = tokens(20)

    def logits(seed: int) -> torch.Tensor:
        config = read_model_config(checkpoint)
        model = build_unloaded(config, 4)
        load_model(model, checkpoint, config, seed=seed, progress=False)
        ours = with_pool(model, config, 4, 64, torch.float32)
        return ours.step([(ours.add(ids, 20), 20)])[0]

    one = logits(1)
    assert one.isfinite().all() and torch.equal(one, logits(1)) and not torch.equal(one, logits(2))
    check_bytes(checkpoint)


def check_bytes(checkpoint: Checkpoint) -> None:
    config = read_model_config(checkpoint)
    weights = open_weights(checkpoint, config, build_unloaded(config, 4), 1)
    raw = [weight for weight in weights if weight.is_raw]
    assert len(raw) == 4 * config.num_layers and all(isinstance(weight, DummyBytes) for weight in raw)
    for weight in raw:
        read = weight.read(torch.uint8, CPU)
        assert tuple(read.shape) == weight.shape and read.numel() == weight.nbytes
        if weight.name.endswith("_scales"):
            assert set(read.unique().tolist()) == {118, 119, 120, 121, 122}
        else:
            assert read.unique().numel() > 250
