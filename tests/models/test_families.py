"""Each family against transformers on tiny random models, in float32."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from model_harness import engine
from moe_families import CASES as MOE_CASES
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tokenspeed.config.model import ModelConfig, RopeConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 160,
}


def llama(rope: dict[str, Any] | None = None, **fields: Any) -> tuple[PreTrainedModel, ModelConfig]:
    rope = rope or {"rope_type": "default", "rope_theta": 10000.0}
    return _pair(LlamaForCausalLM, LlamaConfig(**{**SHAPE, "rope_parameters": rope, **fields}))


def _pair(family: type[PreTrainedModel], hf: Any) -> tuple[PreTrainedModel, ModelConfig]:
    """A random transformers model and our config of it, written down here without the config room."""
    torch.manual_seed(11)
    model = family(hf).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25 if parameter.dim() > 1 else 0.1)
    rope = dict(hf.rope_parameters)
    spelled = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    attention_bias = family is Qwen2ForCausalLM or getattr(hf, "attention_bias", False)
    return model, ModelConfig(
        architecture=family.__name__,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope=RopeConfig(**{spelled.get(key, key): value for key, value in rope.items()}),
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=attention_bias,
        o_bias=family is LlamaForCausalLM and attention_bias,
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=family is Qwen3ForCausalLM,
        dtype="float32",
    )


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


CASES = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: llama(head_dim=16),
    "llama-mha": lambda: llama(num_key_value_heads=6),
    "llama-mqa": lambda: llama(num_key_value_heads=1),
    "llama-linear": lambda: llama(rope("linear", factor=2.5)),
    "llama-dynamic": lambda: llama(rope("dynamic", factor=2.0)),
    "llama-llama3": lambda: llama(
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-yarn": lambda: llama(
        rope("yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=4.0), head_dim=16
    ),
    "llama-yarn-smooth": lambda: llama(
        rope("yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=4.0, truncate=False), head_dim=16
    ),
    "llama-yarn-attention-factor": lambda: llama(
        rope("yarn", factor=4.0, original_max_position_embeddings=40, attention_factor=0.8)
    ),
    "llama-yarn-mscale": lambda: llama(
        rope("yarn", factor=4.0, original_max_position_embeddings=40, mscale=1.5, mscale_all_dim=0.5)
    ),
    "qwen2": lambda: _pair(Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen2-tied": lambda: _pair(Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: _pair(Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3-tied": lambda: _pair(Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    **MOE_CASES,
}


def tokens(count: int, seed: int = 5) -> list[int]:
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def hf_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy by whole forwards: no cache to share a bug with."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, only: str | None) -> None:
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), only=only)
    ids = tokens(37)
    logits = ours.step([(ours.add(ids, 40), 37)])[0]
    assert error(logits, hf_logits(hf, ids)) < 2e-5


@pytest.mark.parametrize("case", ["llama", "llama-llama3", "llama-yarn", "qwen2-tied", "qwen3", "gpt-oss", "qwen3-moe"])
def test_greedy_tokens_equal_transformers(case: str) -> None:
    hf, config = CASES[case]()
    prompt = tokens(9)
    assert engine(config, hf.state_dict()).greedy(prompt, 32) == hf_greedy(hf, prompt, 32)


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("case", ["llama-llama3", "qwen2", "qwen3", "gpt-oss", "gpt-oss-full-first", "qwen3-moe"])
def test_chunks_equal_one_step(case: str, only: str | None) -> None:
    """With windows: pages that left one are not in the table of a later chunk, and must not be read."""
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), only=only)
    ids = tokens(40)
    whole = ours.step([(ours.add(ids, 40), 40)])[0]
    chunked = ours.add(ids, 40)
    parts = [ours.step([(chunked, count)])[0] for count in (1, 7, 1, 4, 20, 7)]
    assert error(torch.cat(parts), whole) < 1e-5


@pytest.mark.parametrize(
    ("case", "only"), [("qwen3", None), ("qwen3", "reference"), ("gpt-oss", None), ("qwen3-moe", None)]
)
def test_mixed_batch_equals_each_request_alone(case: str, only: str | None) -> None:
    """Decode rows, a continued chunk, a whole prompt and a first token in one step over shuffled pages."""
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), num_pages=128, only=only)
    plan = [(30, 29), (25, 10), (17, 0), (1, 0), (9, 8)]  # length, of which already computed
    sequences = [ours.add(tokens(length, seed), length) for seed, (length, _) in enumerate(plan)]
    for sequence, (_, computed) in zip(sequences, plan, strict=True):
        if computed:
            ours.step([(sequence, computed)])
    together = ours.step([(s, length - done) for s, (length, done) in zip(sequences, plan, strict=True)])
    for sequence, logits in zip(sequences, together, strict=True):
        assert error(logits, hf_logits(hf, sequence.tokens)[-logits.shape[0] :]) < 2e-5


def test_bfloat16_stays_near_float32() -> None:
    hf, config = CASES["llama-llama3"]()
    ours = engine(config, hf.state_dict(), dtype=torch.bfloat16)
    ids = tokens(37)
    logits = ours.step([(ours.add(ids, 40), 37)])[0]
    assert logits.dtype == torch.float32
    assert 1e-4 < error(logits, hf_logits(hf, ids)) < 3e-2  # below: it was not bfloat16 at all


def test_dynamic_rope_beyond_the_trained_context() -> None:
    """One table for all lengths: equal to transformers for a sequence of the longest length served."""
    hf, config = CASES["llama-dynamic"]()
    trained = 32
    hf.config.max_position_embeddings = trained
    hf.model.rotary_emb.original_max_seq_len = hf.model.rotary_emb.max_seq_len_cached = trained
    served = msgspec.structs.replace(
        config, max_position=48, rope=msgspec.structs.replace(config.rope, original_max_position=trained)
    )
    ours = engine(served, hf.state_dict())
    ids = tokens(48)
    logits = ours.step([(ours.add(ids, 48), 48)])[0]
    assert error(logits, hf_logits(hf, ids)) < 2e-5


def test_the_clamp_acts() -> None:
    """Without it the logits are others: what the cases above show of it would be nothing if no value reached it."""
    hf, config = CASES["gpt-oss"]()
    ids = tokens(37)
    for experts in (layer.mlp.experts for layer in hf.model.layers):
        experts.limit = 1e9
    ours = engine(config, hf.state_dict())
    assert error(ours.step([(ours.add(ids, 40), 37)])[0], hf_logits(hf, ids)) > 1e-2
