"""`--quantization` and `--kv-cache-dtype` against what the checkpoint is."""

from __future__ import annotations

import msgspec
import pytest

from tokenspeed.config.args import EngineArgs
from tokenspeed.config.engine import Choice
from tokenspeed.config.kv_size import kv_bytes_per_token
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.config.precision_choices import kv_dtype, quantize_on_load
from tokenspeed.config.quantization import Method, QuantizationConfig
from tokenspeed.protocol.errors import ConfigError

DENSE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=40,
    max_position=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)


def stored(method: Method) -> ModelConfig:
    quantization = QuantizationConfig(method=method, granularity="tensor", activations="dynamic")
    return msgspec.structs.replace(DENSE, quantization=quantization)


def test_a_dense_checkpoint() -> None:
    assert quantize_on_load(EngineArgs(), DENSE) is None
    assert quantize_on_load(EngineArgs(quantization="fp8"), DENSE) == "fp8"


@pytest.mark.parametrize(
    ("method", "flag"),
    [
        ("fp8", None),
        ("fp8", "fp8"),
        ("modelopt", "fp8"),
        ("compressed-tensors", "compressed-tensors"),
        ("compressed-tensors", "w8a8_fp8"),
    ],
)
def test_a_quantized_checkpoint_is_not_quantized_again(method: Method, flag: str | None) -> None:
    assert quantize_on_load(EngineArgs(quantization=flag), stored(method)) is None


@pytest.mark.parametrize(
    ("flag", "model", "says"),
    [
        ("compressed-tensors", stored("fp8"), "is quantized by fp8; leave the flag out, or use one of: fp8"),
        ("fp8", stored("compressed-tensors"), "use one of: compressed-tensors, w8a8_fp8"),
        ("w8a8_fp8", DENSE, "is not quantized; --quantization fp8 quantizes it"),
        ("fp8", msgspec.structs.replace(DENSE, qtype="Q4_1"), "holds Q4_1 blocks"),
    ],
)
def test_contradictions_are_refused(flag: str, model: ModelConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization is {flag}.*{says}"):
        quantize_on_load(EngineArgs(quantization=flag), model)


@pytest.mark.parametrize(
    ("flag", "made_for_fp8", "expected", "reasons"),
    [
        ("auto", False, "bfloat16", ["that of the activations"]),
        ("auto", True, "fp8_e4m3", ["the checkpoint was made for it"]),
        ("fp8", False, "fp8_e4m3", []),
        ("fp8_e4m3", True, "fp8_e4m3", []),
    ],
)
def test_kv_cache(flag: str, made_for_fp8: bool, expected: str, reasons: list[str]) -> None:
    choices: list[Choice] = []
    model = msgspec.structs.replace(DENSE, kv_cache_is_fp8=made_for_fp8)
    assert kv_dtype(EngineArgs(kv_cache_dtype=flag), model, "bfloat16", choices) == expected
    assert [choice.reason for choice in choices] == reasons


def test_an_8_bit_cache_has_half_the_bytes() -> None:
    assert kv_bytes_per_token(DENSE, "fp8_e4m3") * 2 == kv_bytes_per_token(DENSE, "bfloat16") == 2 * 3 * 2 * 16 * 2
