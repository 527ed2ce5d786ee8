"""From a GGUF file's tensor names to the HF names that models use, for the llama and qwen families."""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_rot_embd": "self_attn.rotary_emb",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

CONFIG_TENSORS = frozenset({"rope_freqs.weight"})
"""Read with the config (it becomes the llama3 rope), not by the model."""


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`. A name that is not known stays as it is."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def query_or_key(name: str) -> str | None:
    """`q` or `k` for the tensors whose rows the converter reorders in the llama architecture, else None.

    ggml's llama rotates neighbouring pairs (2j, 2j + 1), HF rotates (j, j + D/2), so the converter moves the rows.
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    return match[1] if match else None
