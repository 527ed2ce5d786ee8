"""Router, dispatch and experts of one layer, put together."""

from __future__ import annotations

import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.distributed.collectives import AllReduce
from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.reference.moe import LoopedExperts, Router
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.layers.moe import SparseMLP
from tokenspeed.models.gpt_oss import EXAMPLE
from tokenspeed.moe import dispatch
from tokenspeed.moe.dispatch import LocalDispatch
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization.unquantized import Unquantized

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))


def loaded(*missing: str, mesh: Mesh = SINGLE) -> SparseMLP:
    """The MLP of a tiny GPT-OSS with random weights, biases on the router and the experts."""
    scheme = Unquantized(OPS, "")
    selected, _ = select_moe(moe_need(EXAMPLE, mesh, scheme.expert_format, OPS), "auto", OPS)
    mlp = SparseMLP(EXAMPLE, mesh, scheme, OPS, selected, LocalDispatch(mesh), "m")
    generator = torch.Generator().manual_seed(3)
    for name, entry in mlp.entries().items():
        if name not in missing:
            entry.load(MemoryWeight(name, torch.randn(entry.shape, generator=generator)))
    return mlp


def test_adding_to_the_stream_is_adding() -> None:
    mlp = loaded()
    mlp.finish()
    x, stream = torch.randn(5, EXAMPLE.hidden_size), torch.randn(5, EXAMPLE.hidden_size)
    routed = mlp(x)
    assert routed.routing.expert_ids.shape == (5, 2)
    alone, before = mlp.out(routed), stream.clone()
    mlp.out.add_to(stream, routed)
    torch.testing.assert_close(stream, before + alone)
    assert alone.abs().max() > 0.1


@pytest.mark.parametrize("name", ["m.router.weight", "m.router.bias", "m.experts.down_proj"])
def test_what_never_came_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{name} was not in the checkpoint"):
        loaded(name).finish()


def test_experts_on_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="an expert-parallel size of 2 is not available"):
        LocalDispatch(Mesh(ep=Axis(0, 2)))
    assert LocalDispatch(SINGLE).can_add


def test_what_ranks_give_is_summed_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has half of every expert's columns. Adding half a result to the stream would be wrong, so it is
    not offered."""
    whole = loaded()
    whole.finish()
    x = torch.randn(5, EXAMPLE.hidden_size)
    expected = whole.out(whole(x))
    assert whole.out.max_fused_rows > 0
    asked: list[Axis] = []

    def all_reduce(axis: Axis) -> AllReduce:
        asked.append(axis)
        return lambda y: y + 100  # the sum is the test's; that it was asked for shows

    monkeypatch.setattr(dispatch, "all_reduce", all_reduce)
    total = torch.zeros_like(expected)
    for rank in range(2):
        mlp = loaded(mesh=Mesh(tp=Axis(rank, 2)))
        mlp.finish()
        assert mlp.out.max_fused_rows == mlp.max_fused_rows == 0
        with pytest.raises(AssertionError, match="beyond max_fused_rows"):
            mlp.out.add_to(torch.zeros_like(x), mlp(x))
        total += mlp.out(mlp(x)) - 100
    assert asked == [Axis(0, 2), Axis(1, 2)]
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("of_router", "of_experts"), [(3, 7), (7, 3)])
def test_rows_are_fused_as_far_as_both_ends_fuse(
    of_router: int, of_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "max_fused_rows", of_router)
    monkeypatch.setattr(LoopedExperts, "max_fused_rows", of_experts)
    mlp = loaded()
    mlp.finish()
    assert (mlp.out.max_fused_rows, mlp.max_fused_rows) == (of_experts, 3)
