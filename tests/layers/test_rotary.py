"""Rotary frequencies against transformers' functions, for every kind, and the table's layout."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from transformers import GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.layers.rotary import Rotary, inverse_frequencies
from tokenspeed.models.registry import examples

TRAINED = 4096
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 1.0},
]


def config_of(rope: RopeConfig, head_dim: int = 64, max_position: int = 32) -> ModelConfig:
    base = next(example for example in examples() if example.architecture == "LlamaForCausalLM")
    return msgspec.structs.replace(base, rope=rope, head_dim=head_dim, max_position=max_position)


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(fields: dict[str, Any], theta: float, head_dim: int) -> None:
    hf = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=4 * TRAINED,
        rope_parameters={**fields, "rope_theta": theta, "original_max_position_embeddings": TRAINED},
    )
    truth, magnitude = ROPE_INIT_FUNCTIONS[fields["rope_type"]](hf, torch.device("cpu"))
    ours = {key: value for key, value in fields.items() if key != "rope_type"}
    rope = RopeConfig(kind=fields["rope_type"], theta=theta, original_max_position=TRAINED, **ours)
    frequencies, factor = inverse_frequencies(config_of(rope, head_dim, 4 * TRAINED))
    torch.testing.assert_close(frequencies, truth, rtol=1e-6, atol=0)
    assert factor == pytest.approx(magnitude, rel=1e-9)


def test_gpt_oss_as_published() -> None:
    """`truncate: false` keeps the ends of YaRN's ramp between two dimensions; rounding them gives other frequencies."""
    fields = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    hf = GptOssConfig(
        max_position_embeddings=131072,
        rope_parameters={
            **fields, "rope_type": "yarn", "rope_theta": 150000.0, "original_max_position_embeddings": TRAINED
        },
    )  # fmt: skip
    truth, magnitude = ROPE_INIT_FUNCTIONS["yarn"](hf, torch.device("cpu"))
    rope = RopeConfig(kind="yarn", theta=150000.0, original_max_position=TRAINED, **fields)
    frequencies, factor = inverse_frequencies(config_of(rope, 64, 131072))
    torch.testing.assert_close(frequencies, truth, rtol=1e-6, atol=0)
    assert factor == pytest.approx(magnitude, rel=1e-9)
    rounded, _ = inverse_frequencies(config_of(msgspec.structs.replace(rope, truncate=True), 64, 131072))
    assert (rounded / truth - 1).abs().max() > 0.01


@pytest.mark.parametrize("served", [TRAINED // 2, TRAINED, 3 * TRAINED])
def test_dynamic_is_plain_up_to_the_trained_length_and_fixed_beyond(served: int) -> None:
    hf = LlamaConfig(
        head_dim=64,
        max_position_embeddings=TRAINED,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 2.0,
        },
    )
    truth, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf, torch.device("cpu"), seq_len=served)
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position=TRAINED)
    frequencies, _ = inverse_frequencies(config_of(rope, max_position=served))
    torch.testing.assert_close(frequencies, truth, rtol=1e-6, atol=0)


def test_table_layout() -> None:
    """cos first, sin second; row p holds the angles of position p."""
    rotary = Rotary(config_of(RopeConfig(theta=100.0), head_dim=4, max_position=3), torch.device("cpu"))
    rotary.finish()
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    assert rotary.cos_sin.dtype == torch.float32
    torch.testing.assert_close(rotary.cos_sin, torch.cat((angles.cos(), angles.sin()), dim=1))
