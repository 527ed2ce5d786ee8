"""Families with experts against transformers on tiny random models, in float32."""

from __future__ import annotations

import pytest
import torch
from model_harness import engine
from moe_families import CASES
from test_families import error, hf_greedy, hf_logits, tokens


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, only: str | None) -> None:
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), only=only)
    ids = tokens(37)
    logits = ours.step([(ours.add(ids, 40), 37)])[0]
    assert error(logits, hf_logits(hf, ids)) < 2e-5


@pytest.mark.parametrize("case", ["gpt-oss", "qwen3-moe"])
def test_greedy_tokens_equal_transformers(case: str) -> None:
    hf, config = CASES[case]()
    prompt = tokens(9)
    assert engine(config, hf.state_dict()).greedy(prompt, 32) == hf_greedy(hf, prompt, 32)


@pytest.mark.parametrize("only", [None, "reference"])
@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss-full-first", "qwen3-moe"])
def test_chunks_equal_one_step(case: str, only: str | None) -> None:
    """Pages that left the window are not in the table of a later chunk, and must not be read."""
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), only=only)
    ids = tokens(40)
    whole = ours.step([(ours.add(ids, 40), 40)])[0]
    chunked = ours.add(ids, 40)
    parts = [ours.step([(chunked, count)])[0] for count in (1, 7, 1, 4, 20, 7)]
    assert error(torch.cat(parts), whole) < 1e-5


@pytest.mark.parametrize("case", ["gpt-oss", "qwen3-moe"])
def test_mixed_batch_equals_each_request_alone(case: str) -> None:
    hf, config = CASES[case]()
    ours = engine(config, hf.state_dict(), num_pages=128)
    plan = [(30, 29), (25, 10), (17, 0), (1, 0), (9, 8)]  # length, of which already computed
    sequences = [ours.add(tokens(length, seed), length) for seed, (length, _) in enumerate(plan)]
    for sequence, (_, computed) in zip(sequences, plan, strict=True):
        if computed:
            ours.step([(sequence, computed)])
    together = ours.step([(s, length - done) for s, (length, done) in zip(sequences, plan, strict=True)])
    for sequence, logits in zip(sequences, together, strict=True):
        assert error(logits, hf_logits(hf, sequence.tokens)[-logits.shape[0] :]) < 2e-5


def test_the_clamp_acts() -> None:
    """Without it the logits are others: what the cases above show of it would be nothing if no value reached it."""
    hf, config = CASES["gpt-oss"]()
    ids = tokens(37)
    for experts in (layer.mlp.experts for layer in hf.model.layers):
        experts.limit = 1e9
    ours = engine(config, hf.state_dict())
    assert error(ours.step([(ours.add(ids, 40), 37)])[0], hf_logits(hf, ids)) > 1e-2
