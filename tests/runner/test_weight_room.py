"""Weights that do not fit a GPU are refused before they are read, with the flags that would make them fit."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from runner_support import engine_config, tiny_model

from tokenspeed.loader import load as loader
from tokenspeed.loader.dummy_quantized import DummyFp8Weight
from tokenspeed.loader.kept_bytes import Kept
from tokenspeed.loader.weights import DummyWeight
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.loaded import load
from tokenspeed.runner.weight_room import WeightRoom

GIB = 2**30
CONFIG = engine_config(tiny_model("LlamaForCausalLM"), gpu_memory_utilization=0.9)
TABLE = DummyWeight("model.embed_tokens.weight", (GIB,), 0)
LAYER = DummyWeight("model.layers.0.mlp.up_proj.weight", (GIB, 8), 0)
"""In bfloat16 2 and 16 GiB; in fp8 2 and 8."""


def room(monkeypatch: pytest.MonkeyPatch, total: float, free: float, **changes: Any) -> WeightRoom:
    info = (int(free * GIB), int(total * GIB))
    monkeypatch.setattr(torch, "cuda", types.SimpleNamespace(mem_get_info=lambda: info))
    return WeightRoom(msgspec.structs.replace(CONFIG, **changes))


def refused(there: WeightRoom, dtype: torch.dtype = torch.bfloat16, quantizes: bool = False) -> str:
    with pytest.raises(ConfigError) as raised:
        there.check([TABLE, LAYER], Kept(dtype, quantizes))
    return str(raised.value)


def test_what_fits_is_taken(monkeypatch):
    there = room(monkeypatch, total=20, free=20)
    there.check([TABLE, LAYER], Kept(torch.bfloat16))
    assert there.kept == 18 * GIB


def test_a_model_larger_than_the_gpu(monkeypatch):
    message = refused(room(monkeypatch, total=16, free=15.5))
    for part in ("need at least 18.00 GiB", "15.50 GiB of 16.00 GiB are free", "--quantization fp8", "10.00 GiB"):
        assert part in message, message
    assert "raise --gpu-memory-utilization" not in message


def test_fp8_is_named_only_where_it_is_enough(monkeypatch):
    assert "--quantization" not in refused(room(monkeypatch, total=8, free=7.5))
    assert "smaller or quantized checkpoint" in refused(room(monkeypatch, total=8, free=7.5))
    there = room(monkeypatch, total=8, free=7.5, quantize_on_load="fp8")
    assert "--quantization" not in refused(there, quantizes=True)
    assert there.kept == 10 * GIB


def test_float32_can_be_halved(monkeypatch):
    message = refused(room(monkeypatch, total=24, free=24, dtype="float32"), torch.float32)
    assert "need at least 36.00 GiB" in message and "--dtype bfloat16" in message and "18.00 GiB" in message


def test_fp8_is_not_named_where_the_gpu_has_none(monkeypatch):
    message = refused(room(monkeypatch, total=16, free=15.5, has_e4m3=False))
    assert "--quantization" not in message and "smaller or quantized checkpoint" in message


def test_e4m3_that_is_widened_does_not_fit_as_e4m3(monkeypatch):
    """Regression: the load went on and ran out of memory. --dtype bfloat16 halves it, and keeps e4m3 on a Hopper."""
    stored = [TABLE, DummyFp8Weight(LAYER.name, LAYER.shape, 0, True)]
    room(monkeypatch, total=16, free=16).check(stored, Kept(torch.bfloat16))
    widened = Kept(torch.bfloat16, linears_in_e4m3=False)
    for kept, has_e4m3, parts in (
        (widened, False, ["at least 18.00 GiB"]),
        (replace(widened, dtype=torch.float32), False, ["at least 36.00 GiB"]),
        (replace(widened, dtype=torch.float32), True, ["at least 36.00 GiB", "--dtype bfloat16", ": 10.00 GiB"]),
    ):
        dtype = str(kept.dtype).removeprefix("torch.")
        there = room(monkeypatch, total=16, free=16, has_e4m3=has_e4m3, dtype=dtype)
        with pytest.raises(ConfigError) as raised:
            there.check(stored, kept)
        assert all(part in str(raised.value) for part in parts), str(raised.value)
        assert ("--dtype bfloat16" in str(raised.value)) == (len(parts) > 1)


def test_what_becomes_of_weights_is_known_by_kernels_and_scheme(monkeypatch):
    """On the CPU no kernel keeps e4m3, and the room hears it."""
    heard: list[Kept] = []
    monkeypatch.setattr(WeightRoom, "check", lambda self, weights, kept: heard.append(kept))
    there = room(monkeypatch, total=20, free=20)
    load(CONFIG, there)
    load(msgspec.structs.replace(CONFIG, quantize_on_load="fp8"), there)
    assert heard == [Kept(torch.bfloat16, False, False, False), Kept(torch.bfloat16, True, False, True)]


def test_the_share_that_the_user_set(monkeypatch):
    message = refused(room(monkeypatch, total=40, free=40, gpu_memory_utilization=0.4))
    assert "--gpu-memory-utilization 0.4 leaves 16.00 GiB" in message
    assert "raise --gpu-memory-utilization above 0.45" in message
    room(monkeypatch, total=40, free=40, gpu_memory_utilization=0.45).check([TABLE, LAYER], Kept(torch.bfloat16))


def test_other_processes_are_named(monkeypatch):
    message = refused(room(monkeypatch, total=40, free=10))
    assert "end other processes that use the GPU (30.00 GiB)" in message


def test_nothing_is_read_of_a_model_that_does_not_fit(monkeypatch):
    there = room(monkeypatch, total=0.0001, free=0.0001)
    monkeypatch.setattr(loader, "WeightStream", None)
    monkeypatch.setattr(DummyWeight, "read", None)
    with pytest.raises(ConfigError, match="the weights need at least"):
        load(CONFIG, there)
    assert there.kept > 0
