"""Random weights of an fp8 checkpoint: e4m3 where it would have them, and values like those of dense ones."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.loader.dummy_quantized import DummyFp8Weight, dummy_weight
from tokenspeed.loader.weights import DummyWeight
from tokenspeed.quantization.fp8_format import Fp8Source

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj.weight"


def config(granularity="channel", ignored=()) -> QuantizationConfig:
    return QuantizationConfig(method="fp8", granularity=granularity, activations="dynamic", ignored=ignored)


@pytest.mark.parametrize(
    ("name", "shape", "quantization", "is_fp8"),
    [
        (Q, (256, 128), config(), True),
        (Q, (256, 128), None, False),
        (Q, (256, 128), config(ignored=("re:.*self_attn.*",)), False),
        ("model.embed_tokens.weight", (40, 128), config(), False),
        ("lm_head.weight", (40, 128), config(), True),
        ("lm_head.weight", (40, 128), config(ignored=("lm_head",)), False),
        ("model.norm.weight", (128,), config(), False),
        ("model.layers.0.self_attn.q_proj.bias", (256,), config(), False),
    ],
)
def test_which_tensors_are_e4m3(name, shape, quantization, is_fp8):
    weight = dummy_weight(name, shape, 0, quantization)
    assert isinstance(weight, DummyFp8Weight) == isinstance(weight, Fp8Source) == is_fp8


@pytest.mark.parametrize(("granularity", "scales"), [("tensor", (300,)), ("channel", (300,)), ("block", (3, 2))])
def test_values(granularity, scales):
    weight = dummy_weight(Q, (300, 256), 7, config(granularity))
    found = weight.fp8(CPU)
    assert found.weight.dtype == torch.float8_e4m3fn and tuple(found.scale.shape) == scales
    dense = DummyWeight(Q, (300, 256), 7).read(torch.float32)
    error = (found.dequantize(torch.float32) - dense).norm() / dense.norm()
    assert 0 < error < 0.05
