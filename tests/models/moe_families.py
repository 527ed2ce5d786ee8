"""Tiny random models with experts: transformers' and our config of each, as `test_families` has the dense ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokenspeed.config.model import ModelConfig, MoeConfig, RopeConfig
from tokenspeed.kernels.reference.mxfp4 import quantize

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 160,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def gpt_oss(**fields: Any) -> tuple[PreTrainedModel, ModelConfig]:
    """Windows of 8 tokens in every second layer; expert weights so large that the clamp of the activation acts."""
    hf = GptOssConfig(
        **{**SHAPE, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8, "rope_parameters": YARN}
        | fields
    )
    model = randomized(GptOssForCausalLM(hf), expert_std=0.6)
    moe = MoeConfig(
        num_experts=hf.num_local_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        scoring="topk_softmax",
        renormalize=False,
        router="router",
        router_bias=True,
        expert_bias=True,
        limit=7.0,
        alpha=1.702,
        layout="interleaved",
    )
    windows: tuple[int | None, ...] = ()
    if "sliding_attention" in hf.layer_types:
        windows = tuple(8 if kind == "sliding_attention" else None for kind in hf.layer_types)
    return model, _config(hf, attention_bias=True, o_bias=True, moe=moe, layer_windows=windows, attention_sinks=True)


def qwen3_moe(**fields: Any) -> tuple[PreTrainedModel, ModelConfig]:
    """The second of four layers is dense."""
    given: dict[str, Any] = {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "mlp_only_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    } | fields  # fmt: skip
    hf = Qwen3MoeConfig(**SHAPE | given)
    model = randomized(Qwen3MoeForCausalLM(hf), expert_std=0.25)
    layers = range(hf.num_hidden_layers)
    moe = MoeConfig(
        num_experts=given["num_experts"],
        top_k=given["num_experts_per_tok"],
        intermediate_size=given["moe_intermediate_size"],
        renormalize=given["norm_topk_prob"],
        dense_layers=tuple(
            i for i in layers if i in given["mlp_only_layers"] or (i + 1) % given.get("decoder_sparse_step", 1)
        ),
        layout="fused",
    )
    return model, _config(hf, moe=moe, qk_norm=True)


def randomized(model: PreTrainedModel, expert_std: float, seed: int = 11) -> PreTrainedModel:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = expert_std if ".experts." in name else 0.25 if parameter.dim() > 1 else 0.1
            parameter.normal_(1.0 if "norm" in name else 0.0, 1.0 if name.endswith(".sinks") else std)
    return model.eval()


def _config(hf: Any, **fields: Any) -> ModelConfig:
    spelled = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    return ModelConfig(
        architecture=f"{type(hf).__name__.removesuffix('Config')}ForCausalLM",
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        vocab_size=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope=RopeConfig(**{spelled.get(key, key): value for key, value in hf.rope_parameters.items()}),
        dtype="float32",
        **fields,
    )


CASES = {
    "gpt-oss": lambda: gpt_oss(),
    "gpt-oss-full-first": lambda: gpt_oss(layer_types=["full_attention", "sliding_attention"] * 2),
    "gpt-oss-no-windows": lambda: gpt_oss(layer_types=["full_attention"] * 4),
    "gpt-oss-one-expert": lambda: gpt_oss(num_experts_per_tok=1),
    "qwen3-moe": lambda: qwen3_moe(),
    "qwen3-moe-unnormalised": lambda: qwen3_moe(norm_topk_prob=False),
    "qwen3-moe-every-second": lambda: qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[]),
}


def save_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """The GPT-OSS checkpoint with its experts quantized, laid out as the published ones are."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            packed, scales = quantize(tensor.transpose(1, 2))
            tensors[f"{name}_blocks"] = packed.view(*scales.shape, 16)
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = model.config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
            ],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values, default=str))
