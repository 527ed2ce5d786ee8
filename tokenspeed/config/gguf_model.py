"""GGUF metadata as the HF config it was converted from, so that one reader checks both. No torch."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from tokenspeed.checkpoint.gguf_file import BLOCK_TYPES, GGUFFile, GGUFTensor
from tokenspeed.config.fields import Fields
from tokenspeed.config.rope import DEFAULT_THETA, llama3_from_factors
from tokenspeed.protocol.errors import CheckpointError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TURN_END_TOKENS = ("<|eot_id|>", "<|im_end|>")
"""Files made before `eot_token_id` existed do not say which token ends a turn; their chat template shows it."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The HF spelling of what the metadata and the list of tensors say.

    Raises:
        CheckpointError: unknown architecture, missing key, or a feature that is not supported. Names file and key.
    """
    metadata = Fields(file.path, file.metadata)
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise metadata.bad("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    keys = Fields(file.path, _strip(file.metadata, f"{arch}."), f"{arch}.")
    if keys.get("expert_count"):
        raise keys.bad("expert_count", "none: mixture-of-experts files of this architecture are not supported")
    if keys.get("attention.sliding_window"):
        raise keys.bad("attention.sliding_window", "none: sliding-window attention is not supported yet")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    num_heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=num_heads),
        "vocab_size": _vocab_size(file, keys, tensors),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": _float32(keys.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": _dtype(file.tensors),
    }
    head_dim = keys.integer("attention.key_length", default=hidden // num_heads)
    config["head_dim"] = head_dim
    if keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise keys.bad("attention.value_length", f"attention.key_length, which is {head_dim}")
    config["partial_rotary_factor"] = keys.integer("rope.dimension_count", default=head_dim) / head_dim
    config["rope_theta"] = _float32(keys.number("rope.freq_base", default=DEFAULT_THETA))
    config["rope_scaling"] = _rope_scaling(file, keys, tensors, config["rope_theta"])
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return {**config, "bos_token_id": bos, "eos_token_id": _eos(file)}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Sampling defaults that newer converters keep, in generation_config.json's spelling."""
    names = {
        "general.sampling.temp": "temperature",
        "general.sampling.top_p": "top_p",
        "general.sampling.top_k": "top_k",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
    found = {hf: file.metadata[key] for key, hf in names.items() if key in file.metadata}
    return {name: _float32(value) if isinstance(value, float) else value for name, value in found.items()}


def block_type(tensors: tuple[GGUFTensor, ...]) -> str | None:
    """The commonest type of the matrices when it is a block type (`Q4_1`), else None."""
    counts = Counter(tensor.qtype for tensor in tensors if len(tensor.shape) == 2)
    if not counts:
        return None
    name = counts.most_common(1)[0][0]
    return name if BLOCK_TYPES[name].block_size > 1 else None


def _strip(metadata: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def _float32(value: float) -> float:
    """The shortest decimal that is the same float32: the file's 9.99999974e-06 was written as 1e-05."""
    packed = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value


def _dtype(tensors: tuple[GGUFTensor, ...]) -> str:
    """What the matrices were computed in. Blocks hold float16 scales of weights that were bfloat16 almost always."""
    counts = Counter(tensor.qtype for tensor in tensors if len(tensor.shape) == 2)
    commonest = counts.most_common(1)[0][0] if counts else "BF16"
    return {"F32": "float32", "F16": "float16"}.get(commonest, "bfloat16")


def _vocab_size(file: GGUFFile, keys: Fields, tensors: dict[str, GGUFTensor]) -> int:
    """Rows of the embedding, which may be padded beyond the token list; without it, the list's length."""
    table = tensors.get("token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    if table is None or len(table.shape) != 2:
        return num_tokens if num_tokens else keys.integer("vocab_size")
    if num_tokens is not None and num_tokens > table.shape[0]:
        raise CheckpointError(
            f"{file.path}: tensor 'token_embd.weight' has {table.shape[0]} rows, expected at least the {num_tokens} "
            "tokens of tokenizer.ggml.tokens"
        )
    return table.shape[0]


def _rope_scaling(file: GGUFFile, keys: Fields, tensors: dict[str, GGUFTensor], theta: float) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none", "linear") and "rope_freqs.weight" in tensors:
        return _llama3(file, tensors["rope_freqs.weight"], theta)
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    if kind == "none" or (kind is None and not factor) or factor == 1.0:
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    names = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling.update({hf: keys.get(key) for key, hf in names.items() if keys.get(key) is not None})
    if kind == "yarn":
        _yarn_magnitude(keys, scaling)
    return scaling


def _yarn_magnitude(keys: Fields, scaling: dict[str, Any]) -> None:
    """Refuse yarn variants whose magnitude is not the standard 0.1 ln(factor) + 1.

    llama.cpp multiplies that by attn_factor; 1 is the same as absent.
    """
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if keys.get(key) not in (None, 1.0):
            raise keys.bad(key, "1: another yarn magnitude is not supported")
    if keys.get("rope.scaling.yarn_log_multiplier"):
        raise keys.bad("rope.scaling.yarn_log_multiplier", "none: it is not supported")
    scaling["rope_type"] = "yarn"


def _llama3(file: GGUFFile, tensor: GGUFTensor, theta: float) -> dict[str, Any] | None:
    where = f"{file.path}: tensor 'rope_freqs.weight'"
    if tensor.qtype != "F32" or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= 4096:
        raise CheckpointError(
            f"{where} is {tensor.qtype} of shape {tensor.shape}, expected F32 of shape (head_dim / 2,)"
        )
    with file.map() as data:
        factors = list(struct.unpack_from(f"<{tensor.shape[0]}f", data, tensor.offset))
    return llama3_from_factors(factors, theta, where) or None


def _eos(file: GGUFFile) -> list[int]:
    """End of text, end of turn and end of message, as far as the file tells."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ids = [token_id for token_id in found if token_id is not None]
    template = file.metadata.get("tokenizer.chat_template")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if found[1] is None and isinstance(template, str) and isinstance(tokens, list):
        ids += [tokens.index(token) for token in _TURN_END_TOKENS if token in template and token in tokens]
    return list(dict.fromkeys(ids))
