"""Schemes: what they keep, what they refuse, and which one is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.registry import examples
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization import interface
from tokenspeed.quantization.gguf import GGUF, GGUFMethod
from tokenspeed.quantization.interface import LinearMethod, LinearShape
from tokenspeed.quantization.select import scheme_for
from tokenspeed.quantization.unquantized import Unquantized

CPU = torch.device("cpu")
FLOAT, _ = select_ops(Need(CPU, torch.float32))
BFLOAT, _ = select_ops(Need(CPU, torch.bfloat16), only="torch_cpu")
CONFIG = examples()[0]


@dataclass
class Blocks:
    """A block-quantized `WeightTensor` in memory."""

    name: str
    data: np.ndarray[Any, Any]
    qtype: str
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        return f"memory: {self.name}"

    def read(self, dtype: torch.dtype, device: torch.device = interface.CPU) -> torch.Tensor:
        kind = gguf.GGMLQuantizationType[self.qtype]
        return torch.from_numpy(gguf.quants.dequantize(self.data, kind)).to(device, dtype, copy=True)

    def raw(self) -> torch.Tensor:
        return torch.from_numpy(self.data)


def blocks(qtype: str, rows: int, columns: int, seed: int) -> Blocks:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[qtype])
    return Blocks(f"w{seed}", data, qtype, (rows, columns))


def method_of(ops: Ops, parts: list[Blocks], has_bias: bool = False) -> GGUFMethod:
    assert ops.block_linear is not None
    rows = sum(part.shape[0] for part in parts)
    method = GGUF(ops, ops.block_linear, "").declare(LinearShape(parts[0].shape[1], rows, has_bias, "layer"))
    start = 0
    for part in parts:
        method.load(part, start, None, None)
        start += part.shape[0]
    return method


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.float() - truth.float()).norm() / truth.float().norm())


def with_qtype(qtype: str | None) -> ModelConfig:
    return msgspec.structs.replace(CONFIG, qtype=qtype)


class Counting:
    """A `BlockLinear` that counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0
        self.qtypes, self.max_rows = inner.qtypes, inner.max_rows

    def pack(self, raw: torch.Tensor, qtype: str, in_features: int) -> object:
        return self.inner.pack(raw, qtype, in_features)

    def __call__(self, x: torch.Tensor, packed: object, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.inner(x, packed, bias)
        return y


@pytest.mark.parametrize("qtypes", [("Q4_1",), ("Q4_0", "Q4_0"), ("Q4_1", "Q4_1", "Q4_1")])
def test_few_rows_use_the_packed_weight_and_many_the_dense_one(qtypes: tuple[str, ...]) -> None:
    counting = Counting(BFLOAT.block_linear)
    ops = replace(BFLOAT, block_linear=counting)
    parts = [blocks(qtype, 32 * (i + 1), 96, i) for i, qtype in enumerate(qtypes)]
    method = method_of(ops, parts)
    method.finish()
    assert method.qtype == qtypes[0]
    truth = torch.cat([part.read(torch.float32) for part in parts])
    for rows, calls in ((1, 1), (8, 2), (9, 2), (40, 2)):
        x = torch.randn(rows, 96).bfloat16()
        assert error(method.apply(x), x.float() @ truth.t()) < 1e-2
        assert counting.calls == calls


@pytest.mark.parametrize("qtypes", [("Q4_1", "Q4_0"), ("Q4_1", "Q8_0"), ("Q5_0",)])
def test_mixed_or_unknown_types_are_dense(qtypes: tuple[str, ...]) -> None:
    counting = Counting(BFLOAT.block_linear)
    parts = [blocks(qtype, 32, 96, i) for i, qtype in enumerate(qtypes)]
    method = method_of(replace(BFLOAT, block_linear=counting), parts)
    method.finish()
    assert method.qtype is None
    x = torch.randn(2, 96).bfloat16()
    truth = torch.cat([part.read(torch.float32) for part in parts])
    assert error(method.apply(x), x.float() @ truth.t()) < 1e-2
    assert counting.calls == 0


def test_parts_may_come_in_any_order_and_in_shards() -> None:
    first, second = blocks("Q4_1", 32, 64, 1), blocks("Q4_1", 48, 64, 2)
    assert BFLOAT.block_linear is not None
    method = GGUF(BFLOAT, BFLOAT.block_linear, "").declare(LinearShape(64, 40, False, "layer"))
    method.load(second, 16, None, (24, 48))
    method.load(first, 0, None, (16, 32))
    method.finish()
    truth = torch.cat((first.read(torch.float32)[16:32], second.read(torch.float32)[24:48]))
    assert method.qtype == "Q4_1"
    for rows in (3, 12):
        x = torch.randn(rows, 64).bfloat16()
        assert error(method.apply(x), x.float() @ truth.t()) < 1e-2


def test_a_cut_through_columns_is_dense() -> None:
    weight = blocks("Q4_1", 32, 128, 3)
    assert BFLOAT.block_linear is not None
    method = GGUF(BFLOAT, BFLOAT.block_linear, "").declare(LinearShape(64, 32, False, "layer"))
    method.load(weight, 0, (64, 128), None)
    method.finish()
    assert method.qtype is None
    x = torch.randn(2, 64).bfloat16()
    assert error(method.apply(x), x.float() @ weight.read(torch.float32)[:, 64:].t()) < 1e-2


def test_bias_reaches_both_paths() -> None:
    weight, bias = blocks("Q4_1", 32, 64, 4), torch.randn(32)
    method = method_of(BFLOAT, [weight], has_bias=True)
    method.load_bias(MemoryWeight("b", bias), 0, None)
    method.finish()
    for rows in (1, 20):
        x = torch.randn(rows, 64).bfloat16()
        assert error(method.apply(x), x.float() @ weight.read(torch.float32).t() + bias) < 1e-2


def test_dequantized_weights_are_exact_in_float32() -> None:
    weight = blocks("Q4_1", 32, 64, 5)
    method = Unquantized(FLOAT, "").declare(LinearShape(64, 32, False, "layer"))
    method.load(weight, 0, None, None)
    method.finish()
    assert method.dense is not None
    assert torch.equal(method.dense, weight.read(torch.float32))


def dense_method(has_bias: bool = False) -> LinearMethod:
    return Unquantized(FLOAT, "").declare(LinearShape(8, 6, has_bias, "the.layer"))


@pytest.mark.parametrize(
    ("shape", "row_start", "message"),
    [((6, 9), 0, "expects 8 columns"), ((5, 8), 2, "at most 4 rows from row 2"), ((6,), 0, "expected a matrix")],
)
def test_a_part_that_does_not_fit(shape: tuple[int, ...], row_start: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        dense_method().load(MemoryWeight("w", torch.zeros(shape)), row_start, None, None)
    assert "memory: w" in str(refused.value)


def test_a_gap_between_parts_is_found() -> None:
    method = dense_method()
    method.load(MemoryWeight("a", torch.zeros(2, 8)), 0, None, None)
    method.load(MemoryWeight("b", torch.zeros(2, 8)), 4, None, None)
    with pytest.raises(CheckpointError, match=r"the\.layer: rows from 2 on of its weight"):
        method.finish()


def test_a_missing_bias_is_found() -> None:
    method = dense_method(has_bias=True)
    method.load(MemoryWeight("w", torch.zeros(6, 8)), 0, None, None)
    with pytest.raises(CheckpointError, match="of its bias"):
        method.finish()


def test_an_unwanted_or_misshapen_bias() -> None:
    with pytest.raises(CheckpointError, match="has no bias"):
        dense_method().load_bias(MemoryWeight("b", torch.zeros(6)), 0, None)
    with pytest.raises(CheckpointError, match="does not fit the bias"):
        dense_method(has_bias=True).load_bias(MemoryWeight("b", torch.zeros(7)), 0, None)


def test_selection_and_its_reasons() -> None:
    plain = scheme_for(with_qtype(None), BFLOAT)
    assert (plain.name, plain.reason) == (
        "unquantized",
        "the checkpoint is not quantized; weights are kept in bfloat16",
    )
    kept = scheme_for(with_qtype("Q4_1"), BFLOAT)
    assert kept.name == "gguf"
    assert "Q4_0, Q4_1 stay quantized for up to 8 rows" in kept.reason
    exact = scheme_for(with_qtype("Q4_1"), FLOAT)
    assert exact.name == "unquantized"
    assert "no kernel keeps Q4_1 blocks on cpu in float32" in exact.reason
    with pytest.raises(ConfigError, match=r"'gptq'.*Q4_1"):
        scheme_for(with_qtype("gptq"), BFLOAT)


def test_float32_never_keeps_blocks() -> None:
    """Exactness: in float32 a GGUF file is dequantized, so that greedy tokens equal transformers'."""
    assert FLOAT.block_linear is None
