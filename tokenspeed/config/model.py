"""A model's shape, in one neutral form, whatever file it came from. No torch.

`read_model_config` reads an HF config.json (with generation_config.json beside it) or GGUF metadata, which is turned
into the same spelling first. What cannot run here is refused by file, field and value; nothing that changes the model's
output is skipped silently.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.gguf_file import read_gguf
from tokenspeed.checkpoint.local import read_json
from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.config import gguf_model
from tokenspeed.config.families import (
    SUPPORTED_ARCHITECTURES,
    Family,
    family_of,
    read_architecture,
    read_windows,
    with_default_rope,
)
from tokenspeed.config.fields import Fields
from tokenspeed.config.moe import (
    EXPERTS_PER_TOKEN,
    MOE_FIELDS,
    NUM_EXPERTS,
    MoeConfig,
    read_gpt_oss,
    read_qwen3_moe,
    stored_layout,
)
from tokenspeed.config.quantization import Quantization, QuantizationConfig, read_quantization
from tokenspeed.config.rope import RopeConfig, read_rope
from tokenspeed.protocol.errors import CheckpointError, ConfigError, InvalidRequest
from tokenspeed.protocol.sampling import SamplingParams

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "MoeConfig", "RopeConfig", "read_model_config"]

Dtype = Literal["float32", "bfloat16", "float16"]

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
"""A model is built before its weights are compared; a damaged count must not keep that busy for hours."""

DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model card of the embedded default (SmolLM2-135M-Instruct) recommends."""

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_READ_FIELDS = frozenset(
    (
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "tie_word_embeddings",
        "attention_bias",
        "attn_logit_softcapping",
        "o_bias",
        "mlp_bias",
        "dtype",
        "torch_dtype",
        "hidden_act",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "quantization_config",
        "compression_config",
        "bos_token_id",
        "eos_token_id",
        *frozenset().union(*MOE_FIELDS.values()),
    )
)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What layers, loader, scheduler and tokenizer need to know of a model.

    Fields:
        architecture: HF class name (`LlamaForCausalLM`); picks the family file.
        max_position: longest context in tokens, linear and yarn extension included.
        qk_norm: per-head RMSNorm on queries and keys (Qwen3).
        attention_bias: biases on q, k, v; o_bias: bias on the output projection; mlp_bias: on the MLP.
        layer_windows: for each layer the tokens that a query sees, itself included, None = all; empty = all see all.
        attention_sinks: every head has a learned logit that joins the softmax's denominator (GPT-OSS).
        attention_logit_cap: attention logits become cap * tanh(logit / cap) (Gemma 2's `attn_logit_softcapping`,
            read in every family); None = no cap.
        moe: its expert layers, or None when every layer is dense.
        dtype: the checkpoint's own: float32, bfloat16 or float16.
        qtype: the commonest block type of a GGUF file (`Q4_1`), or None.
        quantization: of safetensors weights, or None when they are not.
        kv_cache_is_fp8: the checkpoint was made for a KV cache of 8-bit floats.
        eos_token_ids: union of config, generation_config and tokenizer (GGUF: eos, eot, eom).
        sampling_defaults: from generation_config: temperature, top_p, top_k, min_p, repetition_penalty as present.
        extra: family-specific values as found in the file, for families that need more.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: Dtype = "bfloat16"
    qtype: str | None = None
    layer_windows: tuple[int | None, ...] = ()
    attention_sinks: bool = False
    attention_logit_cap: float | None = None
    moe: MoeConfig | None = None
    quantization: QuantizationConfig | None = None
    kv_cache_is_fp8: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = {}
    extra: dict[str, Any] = {}


def read_model_config(checkpoint: Checkpoint, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Read and check the model's config.

    Args:
        overrides: patched onto the HF config (`--hf-overrides`), nested objects merged; for GGUF in HF spelling too.

    Raises:
        CheckpointError: a field that is missing, cannot be, or asks for what is not supported. Names file and field.
        ConfigError: an override of a field that is not read.
    """
    path = Path(checkpoint.config_path)
    qtype: str | None = None
    modelopt: dict[str, Any] | None = None
    if path.suffix == ".gguf":
        file = read_gguf(path)
        values = gguf_model.hf_config(file)
        generation = gguf_model.generation_config(file)
        qtype = gguf_model.block_type(file.tensors) if checkpoint.format == "gguf" else None
    else:
        values = read_json(path)
        beside = path.parent / "generation_config.json"
        generation = read_json(beside) if beside.is_file() else {}
        beside = path.parent / "hf_quant_config.json"
        modelopt = read_json(beside) if beside.is_file() else None
        if values.get("dtype") is None and values.get("torch_dtype") is None and checkpoint.format == "safetensors":
            values = {**values, "dtype": _stored_dtype(checkpoint.weight_files[0])}
    if checkpoint.name == "default":
        generation = DEFAULT_SAMPLING | generation
    fields = Fields(str(path), _patched(values, overrides or {}))
    quantization = read_quantization(fields, modelopt, f"{path.parent}/hf_quant_config.json")
    config = _model_config(fields, Fields(f"{path.parent}/generation_config.json", generation), qtype, quantization)
    _check_moe_overrides(overrides or {}, config.architecture)
    return msgspec.structs.replace(config, moe=_moe(fields, config.architecture, quantization, checkpoint))


def _patched(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in _READ_FIELDS:
            raise ConfigError(
                f"--hf-overrides: {name!r} is not read by any family; read are {', '.join(sorted(_READ_FIELDS))}"
            )
    if not overrides:
        return values
    # Two spellings of one thing must meet, or an override in the one would lose against the file in the other.
    for pair in (NUM_EXPERTS, EXPERTS_PER_TOKEN):
        if any(overrides.get(name) is not None for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    return _merged(_new_spelling(values), _new_spelling(overrides))


def _check_moe_overrides(overrides: dict[str, Any], architecture: str) -> None:
    own = MOE_FIELDS.get(architecture, frozenset())
    for name in overrides:
        if any(name in fields for fields in MOE_FIELDS.values()) and name not in own:
            raise ConfigError(
                f"--hf-overrides: {name!r} is not read for {architecture}; of expert layers it reads "
                f"{', '.join(sorted(own)) or 'nothing'}"
            )


def _new_spelling(values: dict[str, Any]) -> dict[str, Any]:
    """`torch_dtype`, `rope_theta`, `rope_scaling` and its `type` as transformers 5 writes them."""
    result = dict(values)
    if "torch_dtype" in result:
        result.setdefault("dtype", result.pop("torch_dtype"))
    rope = result.pop("rope_scaling", {})
    if rope is None:
        rope = {"rope_type": "default"}
    parts = [rope, result.pop("rope_parameters", None) or {}]
    if not all(isinstance(part, dict) for part in parts):
        return values
    merged = parts[0] | parts[1]
    if "type" in merged:
        merged.setdefault("rope_type", merged.pop("type"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in result:
            merged.setdefault(name, result.pop(name))
    return {**result, "rope_parameters": merged} if merged else result


def _merged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for name, value in overrides.items():
        before = result.get(name)
        result[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _model_config(fields: Fields, generation: Fields, qtype: str | None, quantization: Quantization) -> ModelConfig:
    architecture = read_architecture(fields)
    family = family_of(architecture)
    if fields.get("hidden_act") not in (None, "silu", "swish"):
        raise fields.bad("hidden_act", "silu")
    hidden = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.bad("num_key_value_heads", f"a divisor of num_attention_heads, which is {num_heads}")
    rope, max_position = read_rope(with_default_rope(fields, family))
    attention_bias = _attention_bias(fields, architecture, family)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden, num_heads, family),
        vocab_size=fields.integer("vocab_size"),
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        o_bias=fields.flag("o_bias", attention_bias and family.o_bias),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        layer_windows=read_windows(fields, family),
        attention_sinks=family.attention_sinks,
        attention_logit_cap=fields.optional_number("attn_logit_softcapping"),
        dtype=_dtype(fields),
        qtype=qtype,
        quantization=quantization.weights,
        kv_cache_is_fp8=quantization.kv_cache_is_fp8,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id"))),
        sampling_defaults=_sampling_defaults(generation),
    )


def _sampling_defaults(generation: Fields) -> dict[str, float]:
    """What a request that says nothing gets. Held to what a request may say: else each one would be refused.

    Raises:
        CheckpointError: a value that no request may have.
    """
    found: dict[str, float] = {}
    for name in _SAMPLING_FIELDS:
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise generation.bad(name, "a number")
        if name == "top_k":
            value = generation.integer(name, minimum=-1)
        try:
            msgspec.convert({name: value}, SamplingParams)
        except InvalidRequest as error:
            raise CheckpointError(f"{generation.where}: {error.message}; correct it there") from None
        found[name] = float(value)
    return found


def _moe(fields: Fields, architecture: str, quantization: Quantization, checkpoint: Checkpoint) -> MoeConfig | None:
    """The expert layers of a family that has them.

    Raises:
        CheckpointError: a field that cannot be, or weights quantized in a way that this family is not read in.
    """
    method = None if quantization.weights is None else quantization.weights.method
    if architecture == "GptOssForCausalLM":
        if method not in (None, "mxfp4"):
            raise CheckpointError(
                f"{fields.where}: quantization by {method} is not read for GptOssForCausalLM; mxfp4 and bfloat16 are"
            )
        return read_gpt_oss(fields)
    if method == "mxfp4":
        raise CheckpointError(f"{fields.where}: quantization by mxfp4 is read for GptOssForCausalLM only")
    if architecture == "Qwen3MoeForCausalLM":
        return read_qwen3_moe(fields, stored_layout(checkpoint))
    return None


def _attention_bias(fields: Fields, architecture: str, family: Family) -> bool:
    """Biases on q, k and v; in Qwen2 without asking, elsewhere one field speaks for all four projections."""
    if architecture == "Qwen2ForCausalLM":
        return True
    return fields.flag("attention_bias", family.attention_bias)


def _head_dim(fields: Fields, hidden: int, num_heads: int, family: Family) -> int:
    if fields.get("head_dim") is None and family.head_dim is not None:
        return family.head_dim
    if fields.get("head_dim") is None:
        if hidden % num_heads:
            raise fields.bad("hidden_size", f"a multiple of num_attention_heads, which is {num_heads} (or a head_dim)")
        return hidden // num_heads
    head_dim = fields.integer("head_dim", maximum=MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.bad("head_dim", "an even number: rotary embedding turns pairs")
    return head_dim


def _dtype(fields: Fields) -> Dtype:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    known: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    if value is None:
        return "float32"
    if not isinstance(value, str) or value.removeprefix("torch.") not in known:
        raise fields.bad(name, f"one of {', '.join(known)}")
    return known[value.removeprefix("torch.")]


def _stored_dtype(weight_file: str) -> str:
    """For a config that does not say: the commonest type in the first shard; transformers' float32 when it has none.
    What 8-bit weights were made from is bfloat16 today."""
    counts = Counter(entry.dtype for entry in read_safetensors(weight_file))
    commonest = counts.most_common(1)[0][0] if counts else "F32"
    return {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "bfloat16", "U8": "bfloat16"}.get(commonest, "float32")
