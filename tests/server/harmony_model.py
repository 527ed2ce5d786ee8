"""Tiny GPT-OSS checkpoints with a tokenizer of the published format, at small ids.

The tokenizer is byte-level BPE with o200k's way of splitting and harmony's special tokens. `write_random` has random
weights; `write_scripted` answers by a script, in MXFP4: it thinks, then answers; or, when the user's last word is
"add", it calls a function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM

MARKS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>", "<|endofprompt|>",
)  # fmt: skip
"""At 199998, 199999, 200002, 200003, 200005, 200006, 200007, 200008, 200012 and 200018 of the published tokenizer."""

ANALYSIS, FINAL, COMMENTARY, RECIPIENT = "analysis", "final", "commentary", " to=functions.add "
THOUGHT, ANSWER, JSON, ARGUMENTS, ASSISTANT, TRIGGER = "Hm.", "Grüße", "json", '{"a": 1}', "assistant", "add"
WORDS = (ANALYSIS, FINAL, COMMENTARY, RECIPIENT, THOUGHT, ANSWER, JSON, ARGUMENTS, ASSISTANT, TRIGGER)
"""Tokens of their own, so that a script names them; all else is bytes."""

O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}type {{ tool.function.name }} = {{ tool.function.parameters | tojson }};
{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""The frame of harmony, without the published template's instructions."""

HIDDEN = 64
BAG = 32
"""Dimensions [0, 32) hold the present token, [32, 64) the tokens in the window of the first layer."""


def ids() -> dict[str, int]:
    """Of marks and words, behind the 256 bytes."""
    return {token: 256 + index for index, token in enumerate(MARKS + WORDS)}


def vocab_size() -> int:
    return 256 + len(MARKS) + len(WORDS)


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    assert all(tokenizer.token_to_id(token) == number for token, number in ids().items())
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = [ids()[mark] for mark in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": stops}))


def _config() -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": vocab_size(), "num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2,
        "max_position_embeddings": 512, "initial_context_length": 128, "sliding_window": 8, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True, "swiglu_limit": 7.0,
        "rope_theta": 150000, "eos_token_id": ids()["<|return|>"], "pad_token_id": ids()["<|endoftext|>"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip


def write_random(folder: Path) -> GptOssForCausalLM:
    """Returns the same model in transformers, in float32."""
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_config()))
    torch.manual_seed(7)
    model = GptOssForCausalLM(GptOssConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.4)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return model


def write_scripted(folder: Path) -> None:
    _write_tokenizer(folder)
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(_config() | quantization))
    model = GptOssForCausalLM(GptOssConfig(**_config()))
    state = {
        name: torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        for name, tensor in model.state_dict().items()
        if not name.endswith(("gate_up_proj", "down_proj"))
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for part, rows, groups in (("gate_up_proj", 64, HIDDEN // 32), ("down_proj", HIDDEN, 1)):
            blocks = torch.randint(0, 256, (4, rows, groups, 16), dtype=torch.uint8)
            state[f"{prefix}{part}_blocks"] = blocks if part == "gate_up_proj" else torch.zeros_like(blocks)
            state[f"{prefix}{part}_scales"] = torch.full((4, rows, groups), 120, dtype=torch.uint8)
    # Queries and keys are 0: attention is the mean of the window. Values and o carry the tokens in it to the bag.
    state["model.layers.0.self_attn.v_proj.weight"][:, :BAG] = torch.eye(BAG)
    state["model.layers.0.self_attn.o_proj.weight"][BAG:] = torch.eye(BAG)
    place = {token: index for index, token in enumerate(MARKS + WORDS)}
    for token, index in place.items():
        state["model.embed_tokens.weight"][ids()[token], index] = 1.0
    head = state["lm_head.weight"]

    def follows(token: str, before: str, strength: float, *unless: str) -> None:
        """`token` comes after `before`, but not where one of `unless` is in the window."""
        head[ids()[token], place[before]] = strength
        for other in unless:
            head[ids()[token], BAG + place[other]] = -100.0

    follows("<|channel|>", ASSISTANT, 4)
    follows(ANALYSIS, "<|channel|>", 4, THOUGHT, TRIGGER)
    follows(COMMENTARY, "<|channel|>", 3.5, THOUGHT)
    follows(FINAL, "<|channel|>", 3)
    follows("<|message|>", ANALYSIS, 4)
    follows("<|message|>", FINAL, 4)
    follows(THOUGHT, "<|message|>", 4, FINAL, JSON)
    follows(ARGUMENTS, "<|message|>", 3.5, FINAL)
    follows(ANSWER, "<|message|>", 3)
    follows("<|end|>", THOUGHT, 4)
    follows("<|start|>", "<|end|>", 4)
    follows(ASSISTANT, "<|start|>", 4)
    follows("<|return|>", ANSWER, 4)
    follows(RECIPIENT, COMMENTARY, 4)
    follows("<|constrain|>", RECIPIENT, 4)
    follows(JSON, "<|constrain|>", 4)
    follows("<|message|>", JSON, 4)
    follows("<|call|>", ARGUMENTS, 4)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
