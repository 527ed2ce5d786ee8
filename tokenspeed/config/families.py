"""What the families differ in, as their configs state it: biases, norms, windows, experts, defaults. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.config.fields import Fields
from tokenspeed.protocol.errors import CheckpointError

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
"""HF class name -> model_type."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's config leaves unsaid. Defaults are those of its class in transformers.

    Fields:
        attention_bias: q, k and v have biases when the field is absent.
        o_bias: the output projection has one where q, k and v have.
        head_dim: None = hidden_size / heads.
        slides: layers may have sliding-window attention.
        rope: laid under a config without any.
    """

    attention_bias: bool = False
    o_bias: bool = True
    qk_norm: bool = False
    head_dim: int | None = None
    slides: bool = False
    attention_sinks: bool = False
    rope: tuple[tuple[str, Any], ...] = ()


_GPT_OSS_ROPE = (
    ("rope_type", "yarn"),
    ("rope_theta", 150000.0),
    ("factor", 32.0),
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("truncate", False),
    ("original_max_position_embeddings", 4096),
)

_FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(attention_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": Family(qk_norm=True),
    "GptOssForCausalLM": Family(
        attention_bias=True, head_dim=64, slides=True, attention_sinks=True, rope=_GPT_OSS_ROPE
    ),
}


def family_of(architecture: str) -> Family:
    """`architecture` is one of `SUPPORTED_ARCHITECTURES`."""
    return _FAMILIES[architecture]


def read_architecture(fields: Fields) -> str:
    """
    Raises:
        CheckpointError: not one that is supported. Names those.
    """
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = fields.get("architectures")
    if names is None:
        for architecture, model_type in SUPPORTED_ARCHITECTURES.items():
            if fields.get("model_type") == model_type:
                return architecture
        raise fields.missing("architectures", f"a list with one of {supported}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        raise fields.bad("architectures", f"a list with one of the supported {supported}")
    return str(names[0])


def with_default_rope(fields: Fields, family: Family) -> Fields:
    """The config, with the family's rope where it has none at all."""
    if not family.rope or any(fields.get(name) is not None for name in ("rope_parameters", "rope_scaling")):
        return fields
    rope = dict(family.rope)
    if fields.get("rope_theta") is not None:
        del rope["rope_theta"]
    return Fields(fields.where, {**fields.values, "rope_parameters": rope}, fields.prefix)


def read_windows(fields: Fields, family: Family) -> tuple[int | None, ...]:
    """For each layer the tokens that a query sees, itself included; empty when all see all.

    `sliding_window` counts the query's own token: with 128, key j is seen from position i when i - 128 < j <= i.

    Raises:
        CheckpointError: windows in a family that is not served with them, or a list that does not fit.
    """
    if not family.slides:
        _refuse_windows(fields)
        return ()
    num_layers = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.bad("layer_types", f"a list of {num_layers} times {' or '.join(known)}")
    if "sliding_attention" not in kinds:
        return ()
    window = fields.integer("sliding_window", default=None if "sliding_window" in fields.values else 128)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_windows(fields: Fields) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        slides = layer_types != ["full_attention"] * len(layer_types) if isinstance(layer_types, list) else True
        if slides:
            raise CheckpointError(
                f"{fields.where}: layer_types has layers other than full_attention; they are not supported yet in this "
                "family"
            )
        num_layers = fields.integer("num_hidden_layers")
        if len(layer_types) != num_layers:
            raise fields.bad("layer_types", f"a list of {num_layers} entries, one for each of num_hidden_layers")
    elif fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None:
        first = fields.integer("max_window_layers", default=28, minimum=0)
        if fields.get("model_type") == "qwen3_moe":
            first = 0  # transformers slides in all layers of this family, whatever max_window_layers says
        if first < fields.integer("num_hidden_layers"):
            raise fields.bad(
                "use_sliding_window",
                f"false: sliding-window attention (here in layers {first} and up) is not supported yet in this family",
            )
