"""A model's shape, in one neutral form, whatever file it came from. No torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. `kind` picks which of the other fields count.

    Fields:
        kind: default, linear, dynamic, yarn or llama3 (names of `rope_scaling.rope_type` in HF configs).
        theta: base.
        factor: length extension factor.
        original_max_position: context the model was trained with before the extension.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: YaRN (arXiv 2309.00071).
        low_freq_factor, high_freq_factor: llama3.
        partial_rotary_factor: share of head_dim that rotates.
    """

    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What layers, loader, scheduler and tokenizer need to know of a model.

    Fields:
        architecture: HF class name (`LlamaForCausalLM`); picks the family file.
        qk_norm: per-head RMSNorm on queries and keys (Qwen3).
        attention_bias: biases on q, k, v; o_bias: bias on the output projection; mlp_bias: on the MLP.
        dtype: the checkpoint's own: float32, bfloat16 or float16.
        qtype: the commonest block type of a GGUF file (`Q4_1`), or the config's quant_method, or None.
        eos_token_ids: union of config, generation_config and tokenizer (GGUF: eos, eot).
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
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    qtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = {}
    extra: dict[str, Any] = {}
