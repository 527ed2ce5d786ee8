"""What a checkpoint says of its quantization: three spellings, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.config.fields import Fields
from tokenspeed.config.quantization import Quantization, QuantizationConfig, read_quantization
from tokenspeed.protocol.errors import CheckpointError

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}


def read(config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> Quantization:
    return read_quantization(Fields("config.json", config), modelopt, "hf_quant_config.json")


def compressed(group: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"compression_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}, **more}}


def test_a_checkpoint_that_is_not_quantized() -> None:
    assert read({}) == Quantization(None, False)
    assert read({"quantization_config": None}) == Quantization(None, False)


@pytest.mark.parametrize(
    ("config", "modelopt", "expected"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, None, ("fp8", "tensor", "dynamic", False)),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3"}},
            None,
            ("fp8", "tensor", "static", False),
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            None,
            ("fp8", "block", "dynamic", False),
        ),
        (compressed(GROUP), None, ("compressed-tensors", "tensor", "none", False)),
        (
            compressed(GROUP, kv_cache_scheme={"num_bits": 8, "type": "float"}),
            None,
            ("compressed-tensors", "tensor", "none", True),
        ),
        ({}, {"quantization": {"quant_algo": "FP8"}}, ("modelopt", "tensor", "static", False)),
        (
            {},
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            ("modelopt", "tensor", "static", True),
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            {"quantization": {"quant_algo": "NVFP4"}},  # config.json goes first
            ("modelopt", "tensor", "static", False),
        ),
    ],
)
def test_spellings(config: dict[str, Any], modelopt: dict[str, Any] | None, expected: tuple[Any, ...]) -> None:
    found = read(config, modelopt)
    assert found.weights is not None
    method, granularity, activations = found.weights.method, found.weights.granularity, found.weights.activations
    assert (method, granularity, activations, found.kv_cache_is_fp8) == expected


def test_only_the_kv_cache() -> None:
    values = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert read({}, values) == Quantization(None, True)


@pytest.mark.parametrize(
    ("config", "modelopt", "says"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, None, "config.json: quantization_config asks for 'awq'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, None, "fmt is 'e5m2', expected e4m3"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}},
            None,
            r"weight_block_size is \[1, 32\], expected \[128, 128\]",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "group"}},
            None,
            "activation_scheme is 'group'",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignored_layers": "lm_head"}},
            None,
            "ignored_layers is 'lm_head', expected a list",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}},
            None,
            "'re:\\(' is not a regular expression",
        ),
        (compressed({**GROUP, "weights": {"num_bits": 4, "type": "int"}}), None, "weights.num_bits is 4, expected 8"),
        (compressed({**GROUP, "weights": {"num_bits": 8, "type": "int"}}), None, "weights.type is 'int'"),
        (compressed({**GROUP, "targets": ["re:.*mlp"]}), None, "targets is"),
        (
            compressed({**GROUP, "weights": {**GROUP["weights"], "strategy": "group"}}),
            None,
            "strategy is 'group', expected tensor, channel or block",
        ),
        ({}, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json: quantization.quant_algo is 'NVFP4'"),
        ({}, {"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo is 'INT8'"),
        ({}, {"producer": {}}, "hf_quant_config.json: quantization is None"),
    ],
)
def test_what_is_refused(config: dict[str, Any], modelopt: dict[str, Any] | None, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(config, modelopt)


@pytest.mark.parametrize(
    ("ignored", "module", "expected"),
    [
        (("lm_head",), "lm_head", True),
        (("lm_head",), "model.layers.0.mlp.down_proj", False),
        (("model.layers.0.self_attn.o_proj",), "model.layers.0.self_attn.o_proj", True),
        (("model.layers.1",), "model.layers.1.mlp.down_proj", True),
        (("model.layers.1",), "model.layers.11.mlp.down_proj", False),
        (("re:.*down_proj",), "model.layers.0.mlp.down_proj", True),
        (("*.o_proj",), "model.layers.0.self_attn.o_proj", True),
        (("model.layers.0.self_attn.q_proj",), "model.layers.0.self_attn.qkv_proj", False),
        (tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"), "model.layers.0.self_attn.qkv_proj", True),
        (("re:.*mlp.*",), "model.layers.0.mlp.gate_up_proj", True),
    ],
)
def test_ignored_modules(ignored: tuple[str, ...], module: str, expected: bool) -> None:
    config = QuantizationConfig(method="fp8", granularity="tensor", activations="dynamic", ignored=ignored)
    assert config.is_ignored(module) is expected
