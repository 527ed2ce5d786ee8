"""Shards and load rules of linear layers: two ranks' parts put together equal the whole."""

from __future__ import annotations

import msgspec
import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.layers.entry import Entry, join
from tokenspeed.layers.linear import MergedColumnParallel, Part, QKVParallel, RowParallel
from tokenspeed.models.registry import examples
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.quantization.unquantized import Unquantized

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))
SCHEME = Unquantized(OPS, "")
RANKS = [Mesh(tp=Axis(rank, 2)) for rank in range(2)]
QWEN2 = next(example for example in examples() if example.architecture == "Qwen2ForCausalLM")


def load(layer: MergedColumnParallel | RowParallel, state: dict[str, torch.Tensor]) -> None:
    entries = layer.entries()
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(t.shape) for n, t in state.items()}
    for name, entry in reversed(entries.items()):  # any order will do
        entry.load(MemoryWeight(name, state[name]))
    layer.finish()


def test_merged_columns_are_the_parts_side_by_side() -> None:
    parts = (Part("m.a", 6), Part("m.b", 10))
    state = {"m.a.weight": torch.randn(6, 8), "m.a.bias": torch.randn(6)}
    state |= {"m.b.weight": torch.randn(10, 8), "m.b.bias": torch.randn(10)}
    x = torch.randn(3, 8)
    wanted = [x @ state[f"m.{p}.weight"].t() + state[f"m.{p}.bias"] for p in "ab"]
    whole = MergedColumnParallel(8, parts, True, SINGLE, SCHEME, "m")
    load(whole, state)
    torch.testing.assert_close(whole(x), torch.cat(wanted, dim=1))
    for rank, mesh in enumerate(RANKS):
        shard = MergedColumnParallel(8, parts, True, mesh, SCHEME, "m")
        load(shard, state)
        mine = [part.chunk(2, dim=1)[rank] for part in wanted]
        torch.testing.assert_close(shard(x), torch.cat(mine, dim=1))


def test_qkv_is_cut_between_heads() -> None:
    config = QWEN2
    shapes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    state: dict[str, torch.Tensor] = {}
    for name, heads in shapes.items():
        state[f"p.{name}_proj.weight"] = torch.randn(heads * config.head_dim, config.hidden_size)
        state[f"p.{name}_proj.bias"] = torch.randn(heads * config.head_dim)
    x = torch.randn(2, config.hidden_size)
    for rank, mesh in enumerate(RANKS):
        layer = QKVParallel(config, mesh, SCHEME, "p")
        load(layer, state)
        wanted = [
            (x @ state[f"p.{n}_proj.weight"].t() + state[f"p.{n}_proj.bias"]).chunk(2, dim=1)[rank] for n in "qkv"
        ]
        torch.testing.assert_close(layer(x), torch.cat(wanted, dim=1))


def test_heads_that_ranks_cannot_share() -> None:
    config = msgspec.structs.replace(QWEN2, num_kv_heads=1)
    with pytest.raises(ConfigError, match=r"k_proj is 1, which 2 ranks cannot share"):
        QKVParallel(config, RANKS[0], SCHEME, "p")


def test_column_and_row_alone() -> None:
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    for layer in (
        MergedColumnParallel(8, (Part("l", 6),), True, SINGLE, SCHEME, "l"),
        RowParallel(8, 6, True, SINGLE, SCHEME, "l"),
    ):
        load(layer, {"l.weight": weight, "l.bias": bias})
        torch.testing.assert_close(layer(x), x @ weight.t() + bias)


def test_a_row_parallel_layer_refuses_ranks_it_cannot_sum_over() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel size of 2"):
        RowParallel(8, 6, False, RANKS[0], SCHEME, "l")


def test_a_name_wanted_twice_is_a_bug() -> None:
    entry = {"a": Entry((1,), lambda weight: None)}
    with pytest.raises(AssertionError, match="wanted twice"):
        join((entry, entry))
