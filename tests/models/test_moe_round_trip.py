"""Checkpoints with experts in every layout, saved by transformers or as published, loaded by our loader."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from model_harness import Engine, build_unloaded, with_pool
from moe_families import CASES, gpt_oss, qwen3_moe, save_mxfp4
from safetensors.torch import load_file, save_file
from test_families import error, hf_greedy, hf_logits, tokens
from transformers import GptOssForCausalLM, PreTrainedModel

from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import ModelConfig, read_model_config
from tokenspeed.loader.load import load_model
from tokenspeed.protocol.errors import CheckpointError


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Engine:
    checkpoint = resolve_checkpoint(str(folder))
    config = read_model_config(checkpoint)
    model = build_unloaded(config, 4, dtype)
    load_model(model, checkpoint, config, progress=False)
    return with_pool(model, config, 4, 64, dtype)


def check(folder: Path, hf: PreTrainedModel) -> ModelConfig:
    ours = loaded(folder)
    ids = tokens(37)
    assert error(ours.step([(ours.add(ids, 40), 37)])[0], hf_logits(hf, ids)) < 2e-5
    return ours.config


@pytest.mark.parametrize("shard_size", ["50GB", "100KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("case", CASES)
def test_saved_by_transformers(case: str, shard_size: str, tmp_path: Path) -> None:
    """Experts of Qwen3 MoE are saved one by one, those of GPT-OSS together."""
    hf, expected = CASES[case]()
    hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    config = check(tmp_path, hf)
    layout = "per_expert" if "qwen3" in case else "interleaved"
    assert config.moe == msgspec.structs.replace(expected.moe, layout=layout)
    assert config.layer_windows == expected.layer_windows


def test_experts_saved_together(tmp_path: Path) -> None:
    hf, expected = qwen3_moe()
    hf.save_pretrained(tmp_path, save_original_format=False)
    assert check(tmp_path, hf).moe == expected.moe  # layout "fused"


def test_mxfp4(tmp_path: Path) -> None:
    """Logits and greedy tokens of the weights that transformers dequantizes from the same file."""
    random, _ = gpt_oss()
    save_mxfp4(random, tmp_path)
    hf = GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokens(37)
    assert error(hf_logits(random, ids), hf_logits(hf, ids)) > 1e-2, "quantization changed nothing"
    check(tmp_path, hf)
    prompt = tokens(9)
    assert loaded(tmp_path).greedy(prompt, 32) == hf_greedy(hf, prompt, 32)


def test_mxfp4_in_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    random, _ = gpt_oss(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    save_mxfp4(random, tmp_path)
    ours, exact = loaded(tmp_path, torch.bfloat16), loaded(tmp_path)
    ids = tokens(37)
    truth = exact.step([(exact.add(ids, 40), 37)])[0]
    assert 1e-4 < error(ours.step([(ours.add(ids, 40), 37)])[0], truth) < 0.1


def test_blocks_that_are_not_bytes_are_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(gpt_oss()[0], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(stored | {name: stored[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' holds numbers, expected bytes \(U8\)"):
        loaded(tmp_path)


def test_bytes_where_numbers_belong_are_refused_by_name(tmp_path: Path) -> None:
    gpt_oss()[0].save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.router.weight"
    save_file(stored | {name: stored[name].to(torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}' holds bytes, expected numbers"):
        loaded(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    qwen3_moe()[0].save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing tensor: {name} \[32, 64\]"):
        loaded(tmp_path)
