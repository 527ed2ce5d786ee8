"""A checkpoint whose model says given texts: real weights for the real engine, and every format's marks as tokens.

The model is a Qwen2 of one layer and one head that repeats what stands LAG tokens back: queries and keys are biases
alone, turned so that with RoPE the score is highest at that distance. The chat template writes a script, its end and
pads, so that what follows the prompt is the script; the last message (or tool result) names it. The pads also keep the
script out of the prompt's end, which parsers read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from scripted_engine import MARKS as SPECIAL_MARKS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<|begin|>", "<|endoftext|>", "<|pad|>"
PLAIN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")
"""Tokens of their own that are not special, as in the tokenizers of Qwen and GLM."""

LAG = 320
PROMPT_TOKENS = LAG + 2
"""Of every prompt: BEGIN, the script, END, pads and the prompt's end."""

MAX_TAIL = 64  # tokens of a prompt's end that the server shows to parsers
NUM_TEXT_TOKENS = 300  # bytes and few more, so that words and what is no mark of its own come in pieces
CODE = 64
"""Width of a token's code: dimensions [0, CODE) hold the present token's, the rest that of the token LAG back."""

ROPE_THETA = 100.0  # enough fast frequencies to tell a distance from its neighbours
SHARPNESS = 16.0


@dataclass(frozen=True)
class Script:
    """What the model says, marks spelled out, and the end of the prompt before it."""

    text: str
    prompt: str = "<|im_start|>assistant\n"


def write_copying(folder: Path, scripts: Mapping[str, Script]) -> Tokenizer:
    """Write a checkpoint of these scripts by name; returns its tokenizer."""
    tokenizer = _tokenizer(script.text for script in scripts.values())
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _template(tokenizer, scripts),
        "eos_token": END,
        "pad_token": PAD,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 2 * CODE, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": CODE,
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA, "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu",
        "eos_token_id": tokenizer.token_to_id(END), "pad_token_id": tokenizer.token_to_id(PAD),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokenizer.get_vocab_size()), folder / "model.safetensors")
    return tokenizer


def _tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of the scripts' own words, so that tokens end in the middle of marks and of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = (BEGIN, END, PAD, "<|im_start|>", *SPECIAL_MARKS)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in PLAIN_MARKS])
    return tokenizer


def _template(tokenizer: Tokenizer, scripts: Mapping[str, Script]) -> str:
    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    entries = []
    for name, script in scripts.items():
        num_pads = LAG + 1 - num_tokens(script.text + END) - num_tokens(script.prompt)
        assert num_pads >= MAX_TAIL, f"{name}: raise LAG by {MAX_TAIL - num_pads}"
        entries.append(f"{_literal(name)}: [{_literal(script.text)}, {num_pads}, {_literal(script.prompt)}]")
    return (
        f"{{%- set script = {{{', '.join(entries)}}}[messages[-1].content] -%}}\n"
        f"{{{{- {_literal(BEGIN)} ~ script[0] ~ {_literal(END)} ~ {_literal(PAD)} * script[1] ~ script[2] -}}}}"
    )


def _literal(text: str) -> str:
    """A Jinja string. Without the `<` of marks: a format is not to be known by the template."""
    return json.dumps(text, ensure_ascii=False).replace("<", "\\x3c")


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    hidden = 2 * CODE
    codes = torch.randint(0, 2, (vocab_size, CODE), generator=torch.Generator().manual_seed(3)).float() * 2 - 1
    nothing = torch.zeros(vocab_size, CODE)
    angles = LAG * ROPE_THETA ** (-torch.arange(CODE // 2, dtype=torch.float64) * 2 / CODE)
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.cat((codes, nothing), 1),
        "lm_head.weight": torch.cat((nothing, codes), 1),
        "model.norm.weight": torch.ones(hidden),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}self_attn.q_proj.weight": torch.zeros(CODE, hidden),
        f"{layer}self_attn.k_proj.weight": torch.zeros(CODE, hidden),
        f"{layer}self_attn.v_proj.weight": torch.eye(CODE, hidden),
        f"{layer}self_attn.q_proj.bias": SHARPNESS * torch.cat((angles.cos(), -angles.sin())).float(),
        f"{layer}self_attn.k_proj.bias": SHARPNESS * torch.cat((torch.ones(CODE // 2), torch.zeros(CODE // 2))),
        f"{layer}self_attn.v_proj.bias": torch.zeros(CODE),
        f"{layer}self_attn.o_proj.weight": torch.cat((torch.zeros(CODE, CODE), torch.eye(CODE))),
        f"{layer}mlp.gate_proj.weight": torch.zeros(32, hidden),
        f"{layer}mlp.up_proj.weight": torch.zeros(32, hidden),
        f"{layer}mlp.down_proj.weight": torch.zeros(hidden, 32),
    }
