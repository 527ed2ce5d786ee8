"""The embedded default model, SmolLM2-135M-Instruct in Q4_1, against transformers.

In float32 greedy tokens are equal; the kept-quantized bfloat16 path is compared by logit error, because margins between
the best two tokens are smaller than its rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_harness import Engine, build_unloaded, with_pool
from transformers import LlamaConfig, LlamaForCausalLM

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.loader.load import load_model

CHATS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("default_model_greedy.json").read_text())["chats"]
"""Prompt and greedy token ids by transformers alone; see golden_default_model.py."""


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> Engine:
    config = read_model_config(checkpoint)
    model = build_unloaded(config, 16, dtype)
    load_model(model, checkpoint, config, progress=False)
    return with_pool(model, config, 16, 40, dtype)


@pytest.fixture(scope="module")
def exact(default_checkpoint: Checkpoint) -> Engine:
    return load(default_checkpoint, torch.float32)


@pytest.fixture(scope="module")
def hf_model(default_checkpoint: Checkpoint) -> LlamaForCausalLM:
    """A transformers model with the file's tensors as the gguf package dequantizes them, renamed here by hand."""
    (path,) = default_checkpoint.weight_files
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )
    state = {hf_name(t.name): torch.from_numpy(dequantized(t)) for t in gguf.GGUFReader(path).tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


def hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, kind, _ = name.split(".")
    modules = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"model.layers.{layer}.{modules[kind]}.weight"


def dequantized(tensor: Any) -> np.ndarray[Any, Any]:
    """Rows of q and k go back from llama.cpp's rotary pairs (2i, 2i + 1) to (i, i + 32)."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


def test_greedy_tokens_equal_transformers(exact: Engine) -> None:
    """Three chats of 64 tokens, decoded together."""
    sequences = [exact.add(chat["prompt_ids"], len(chat["prompt_ids"]) + 64) for chat in CHATS]
    work = [(sequence, len(sequence.tokens)) for sequence in sequences]
    for _ in range(64):
        for sequence, logits in zip(sequences, exact.step(work), strict=True):
            sequence.tokens.append(int(logits[-1].argmax()))
        work = [(sequence, 1) for sequence in sequences]
    for sequence, chat in zip(sequences, CHATS, strict=True):
        assert sequence.tokens[len(chat["prompt_ids"]) :] == chat["greedy_ids"]
        exact.release(sequence)


def test_logits_equal_transformers(exact: Engine, hf_model: LlamaForCausalLM) -> None:
    """Live: prompt and golden answer through both in one forward; the golden tokens are its choice here too."""
    for chat in CHATS:
        ids = chat["prompt_ids"] + chat["greedy_ids"]
        with torch.inference_mode():
            truth = hf_model(torch.tensor([ids])).logits[0]
        first = len(chat["prompt_ids"]) - 1
        assert truth[first:-1].argmax(-1).tolist() == chat["greedy_ids"]
        sequence = exact.add(ids, len(ids))
        logits = exact.step([(sequence, len(ids))])[0]
        exact.release(sequence)
        assert float((logits - truth).norm() / truth.norm()) < 1e-4


def test_quantized_bfloat16_logits_stay_near(default_checkpoint: Checkpoint, exact: Engine) -> None:
    """Prefill by dense bfloat16 and decode by packed blocks, against the same tokens in float32."""
    fast = load(default_checkpoint, torch.bfloat16)
    ids = CHATS[0]["prompt_ids"] + CHATS[0]["greedy_ids"][:16]
    results = []
    for ours in (exact, fast):
        sequence = ours.add(ids, len(ids))
        parts = [ours.step([(sequence, len(ids) - 8)])[0]]
        parts += [ours.step([(sequence, 1)])[0] for _ in range(8)]
        results.append((parts[0], torch.cat(parts[1:])))
        ours.release(sequence)
    for name, truth, near in zip(("prefill", "decode"), *results, strict=True):
        error = float((near - truth).norm() / truth.norm())
        print(name, error)
        assert 1e-4 < error < 0.05
