"""Router, dispatch and experts of one layer, put together."""

from __future__ import annotations

import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.layers.moe import LocalDispatch, SparseMLP
from tokenspeed.models.gpt_oss import EXAMPLE
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.quantization.unquantized import Unquantized

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))


def loaded(*missing: str) -> SparseMLP:
    """The MLP of a tiny GPT-OSS with random weights, biases on the router and the experts."""
    scheme = Unquantized(OPS, "")
    selected, _ = select_moe(moe_need(EXAMPLE, SINGLE, scheme.expert_format, OPS, None), "auto", OPS)
    mlp = SparseMLP(EXAMPLE, SINGLE, scheme, OPS, selected, "m")
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
