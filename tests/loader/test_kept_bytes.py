"""Bytes that weights take on a GPU, from headers: what a tensor is kept as."""

from __future__ import annotations

import torch

from tokenspeed.loader.dummy_quantized import DummyBytes, DummyFp8Weight
from tokenspeed.loader.kept_bytes import Kept, kept_bytes
from tokenspeed.loader.weights import DummyWeight

MATRIX = DummyWeight("model.layers.0.self_attn.q_proj.weight", (6, 4), 0)
EXPERTS = DummyWeight("model.layers.0.mlp.experts.down_proj", (3, 6, 4), 0)
NORM = DummyWeight("model.layers.0.input_layernorm.weight", (5,), 0)
TABLE = DummyWeight("model.embed_tokens.weight", (10, 4), 0)
FP8 = DummyFp8Weight("model.layers.1.self_attn.q_proj.weight", (6, 4), 0, True)
BLOCKS = DummyBytes("model.layers.1.mlp.experts.down_proj_blocks", (3, 6, 1, 16), 0)


def test_dense_weights_are_of_the_models_dtype():
    weights = [MATRIX, EXPERTS, NORM, TABLE]
    assert kept_bytes(weights, Kept(torch.bfloat16)) == 2 * (24 + 72 + 5 + 40)
    assert kept_bytes(weights, Kept(torch.float32)) == 4 * (24 + 72 + 5 + 40)


def test_matrices_of_layers_are_halved_by_quantizing():
    assert kept_bytes([MATRIX, EXPERTS, NORM, TABLE], Kept(torch.bfloat16, True)) == 24 + 72 + 2 * 5 + 2 * 40


def test_what_comes_quantized_stays_so():
    assert kept_bytes([FP8, BLOCKS], Kept(torch.bfloat16)) == 24 + 288


def test_what_is_widened_counts_as_it_ends():
    """Regression: one byte was counted where no kernel keeps e4m3, and the load ran out of memory half-way."""
    experts = DummyFp8Weight("model.layers.1.mlp.experts.0.up_proj.weight", (6, 5), 0, True)
    assert kept_bytes([FP8, experts, BLOCKS], Kept(torch.bfloat16, False, False, False)) == 2 * (24 + 30) + 288
    assert kept_bytes([FP8, experts], Kept(torch.bfloat16, False, True, False)) == 24 + 2 * 30
    assert kept_bytes([FP8, experts], Kept(torch.float32, False, False, True)) == 4 * 24 + 30
    assert kept_bytes([MATRIX, EXPERTS], Kept(torch.float32, True, False, True)) == 4 * 24 + 72


def test_no_weights_no_bytes():
    assert kept_bytes([], Kept(torch.bfloat16, True)) == 0
