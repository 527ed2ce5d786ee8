"""Expert layers as a config and the names of a checkpoint's tensors state them. No torch."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.config.fields import Fields
from tokenspeed.protocol.errors import CheckpointError

MAX_EXPERTS = 4096

NUM_EXPERTS = ("num_local_experts", "num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token")
"""Two spellings of one number each."""

_COUNTS = (*NUM_EXPERTS, *EXPERTS_PER_TOKEN)
MOE_FIELDS = {
    "GptOssForCausalLM": frozenset((*_COUNTS, "swiglu_limit", "swiglu_alpha")),
    "Qwen3MoeForCausalLM": frozenset(
        (*_COUNTS, "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    ),
}
"""Architecture -> fields of config.json that are read here for it."""

Layout = Literal["per_expert", "fused", "interleaved"]

_ONE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_ALL_EXPERTS = ".mlp.experts.gate_up_proj"


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Expert layers.

    Fields:
        num_experts, top_k, intermediate_size: of one layer; intermediate_size is one expert's.
        scoring, renormalize: see `moe.interface.RouterRule`.
        router: name of the router below `mlp`.
        router_bias, expert_bias: biases on the router and on both matrices of every expert.
        limit, alpha: see `moe.interface.Activation`.
        dense_layers: layers with a dense MLP of `ModelConfig.intermediate_size` instead.
        layout: how the checkpoint stores experts, below `mlp.experts`:
            per_expert   {e}.gate_proj.weight and up_proj [I, H], {e}.down_proj.weight [H, I]
            fused        gate_up_proj [E, 2 I, H], gate rows then up rows; down_proj [E, H, I]
            interleaved  gate_up_proj [E, H, 2 I], down_proj [E, I, H]; or, MXFP4, gate_up_proj_blocks
                         [E, 2 I, H / 32, 16] and _scales, down_proj_blocks [E, H, I / 32, 16] and _scales; column or
                         row 2 i is gate i, 2 i + 1 is up i
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    renormalize: bool = True
    router: Literal["gate", "router"] = "gate"
    router_bias: bool = False
    expert_bias: bool = False
    limit: float | None = None
    alpha: float = 1.0
    dense_layers: tuple[int, ...] = ()
    layout: Layout = "per_expert"


def read_gpt_oss(fields: Fields) -> MoeConfig:
    """GPT-OSS: every layer has experts with biases, a clamped activation, and weights that sum to one.

    Raises:
        CheckpointError: a field that is missing or cannot be.
    """
    num_experts, top_k = _counts(fields, "num_local_experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("intermediate_size"),
        scoring="topk_softmax",
        renormalize=False,
        router="router",
        router_bias=True,
        expert_bias=True,
        limit=fields.number("swiglu_limit", default=7.0),
        alpha=fields.number("swiglu_alpha", default=1.702),
        layout="interleaved",
    )


def read_qwen3_moe(fields: Fields, layout: Layout) -> MoeConfig:
    """Qwen3 MoE: layer i has experts when (i + 1) is a multiple of decoder_sparse_step and i not in mlp_only_layers.

    Raises:
        CheckpointError: a field that is missing or cannot be.
    """
    num_experts, top_k = _counts(fields, "num_experts")
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise fields.bad("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(num_layers) if (layer + 1) % step or layer in dense),
        layout=layout,
    )


def stored_layout(checkpoint: Checkpoint) -> Layout:
    """How a checkpoint with concatenated gate and up stores its experts, by the names of its tensors.

    Published files have a tensor for each expert; transformers 5 can also save one for all. Random weights are made for
    all experts at once.

    Raises:
        CheckpointError: no expert in any file.
    """
    if checkpoint.format == "config":
        return "fused"
    for path in checkpoint.weight_files:
        for entry in read_safetensors(path):
            if _ONE_EXPERT.search(entry.name):
                return "per_expert"
            if entry.name.endswith(_ALL_EXPERTS):
                return "fused"
    raise CheckpointError(
        f"{checkpoint.config_path}: describes expert layers, but no tensor of {', '.join(checkpoint.weight_files[:5])} "
        "is one of mlp.experts"
    )


def _counts(fields: Fields, usual: str) -> tuple[int, int]:
    """Experts of a layer, whose spelling in the family is `usual`, and experts of a token."""
    num_experts = _count(fields, NUM_EXPERTS, usual, MAX_EXPERTS)
    return num_experts, _count(fields, EXPERTS_PER_TOKEN, EXPERTS_PER_TOKEN[0], num_experts)


def _count(fields: Fields, spellings: tuple[str, str], usual: str, maximum: int) -> int:
    """In the spelling that is there; two have to agree."""
    there = [name for name in spellings if fields.get(name) is not None]
    values = [fields.integer(name, maximum=maximum) for name in there or [usual]]
    if values[0] != values[-1]:
        raise fields.bad(there[1], f"{values[0]}, which {there[0]} is: both say the same thing")
    return values[0]
