"""What an attention layer asks of its backend and its cache: windows, cache groups, sinks of its rank's heads."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from memory_weight import MemoryWeight

from tokenspeed.attention.interface import AttentionBatch, LayerKV
from tokenspeed.cache.spec import group_layers, layer_places
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE, Axis, Mesh
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.layers import linear
from tokenspeed.layers.attention import Attention, Sinks
from tokenspeed.layers.linear import RowParallel
from tokenspeed.layers.rotary import Rotary
from tokenspeed.models.registry import examples
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.unquantized import Unquantized

OPS, _ = select_ops(Need(torch.device("cpu"), torch.float32))
SCHEME = Unquantized(OPS, "")
LLAMA = next(example for example in examples() if example.architecture == "LlamaForCausalLM")
CONFIG = msgspec.structs.replace(
    LLAMA, num_layers=4, layer_windows=(8, None, 8, None), attention_sinks=True, attention_bias=True, o_bias=True
)


@dataclass
class Pages:
    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass
class Recording:
    """A backend that writes down what it is asked."""

    asked: list[tuple[AttentionBatch, int | None, torch.Tensor | None]] = field(default_factory=list)
    caps: list[float | None] = field(default_factory=list)
    name = "recording"
    can_record = False
    note = None

    def plan(self, batch: AttentionBatch) -> None:
        raise AssertionError("a layer plans nothing")

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        self.asked.append((batch, window, sinks))
        self.caps.append(logit_cap)
        return q.flatten(1)


def step(slots: list[int]) -> AttentionBatch:
    count = len(slots)
    return AttentionBatch(
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.ones(count, dtype=torch.int32),
        page_table=torch.zeros(count, 1, dtype=torch.int32),
        slots=torch.tensor(slots),
        num_requests=count,
        num_tokens=count,
    )


def attention(config: ModelConfig, backend: Recording, layer: int) -> Attention:
    rotary = Rotary(config, torch.device("cpu"))
    made = Attention(config, SINGLE, SCHEME, OPS, backend, rotary, layer, f"model.layers.{layer}.self_attn")
    for name, entry in made.entries().items():
        entry.load(MemoryWeight(name, torch.randn(entry.shape)))
    made.finish()
    rotary.finish()
    pool = torch.zeros(3, 16, config.num_kv_heads, config.head_dim)
    made.bind_kv(Pages(pool, pool.clone()))
    return made


@pytest.mark.parametrize("windows", [(8, None, 8, None), (None, 8, None, 8), (8, 8, 8, 8), ()], ids=str)
def test_each_layer_sees_its_own_group_and_window(windows: tuple[int | None, ...]) -> None:
    """Groups count as the cache counts them; keys and values go to the slots of the layer's own group."""
    config = msgspec.structs.replace(CONFIG, layer_windows=windows)
    backend = Recording()
    layers = [attention(config, backend, layer) for layer in range(4)]
    places = layer_places([layer.cache_spec for layer in layers])
    groups = group_layers([layer.cache_spec for layer in layers], 16)
    batch = step([5, 6])
    batch.other_groups = (step([40, 41]),)
    for number, layer in enumerate(layers):
        layer(torch.randn(2, config.hidden_size), torch.tensor([0, 0]), batch)
        given, window, sinks = backend.asked[-1]
        assert window == (windows[number] if windows else None) == groups[places[number].group].window
        assert given is (batch if places[number].group == 0 else batch.other_groups[0])
        assert sinks is not None and sinks.shape == (config.num_heads,)
        assert layer._kv is not None
        written = layer._kv.keys.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist()
        assert written == given.slots.tolist()


def test_a_model_without_sinks_gives_none() -> None:
    backend = Recording()
    layer = attention(msgspec.structs.replace(CONFIG, attention_sinks=False), backend, 0)
    layer(torch.randn(1, CONFIG.hidden_size), torch.tensor([0]), step([3]))
    assert backend.asked[0][2] is None
    assert "model.layers.0.self_attn.sinks" not in layer.entries()


def test_the_logit_cap_of_the_config_reaches_the_backend() -> None:
    backend = Recording()
    for cap in (None, 50.0):
        layer = attention(msgspec.structs.replace(CONFIG, attention_logit_cap=cap), backend, 0)
        layer(torch.randn(1, CONFIG.hidden_size), torch.tensor([0]), step([3]))
    assert backend.caps == [None, 50.0]


def test_sinks_stay_float32_and_are_cut_between_heads() -> None:
    """Values that bfloat16 has not."""
    ops, _ = select_ops(Need(torch.device("cpu"), torch.bfloat16), only="reference")
    whole = torch.randn(8)
    parts = []
    for rank in range(2):
        sinks = Sinks(8, Mesh(tp=Axis(rank, 2)), ops, "a.sinks")
        with pytest.raises(CheckpointError, match=r"a\.sinks was not in the checkpoint"):
            sinks.finish()
        (entry,) = sinks.entries().values()
        assert entry.shape == (8,)
        entry.load(MemoryWeight("a.sinks", whole))
        sinks.finish()
        parts.append(sinks.values)
    assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(CheckpointError, match=r"shape \[7\], expected \[8\]"):
        entry.load(MemoryWeight("a.sinks", torch.randn(7)))


def test_the_bias_of_the_output_projection_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank asks for it, or the checkpoint would have a name that nobody wants; one adds it."""
    monkeypatch.setattr(linear, "all_reduce", lambda axis: None)  # the sum over ranks is the test's
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(3, 8)
    total = torch.zeros(3, 6)
    for rank in range(2):
        layer = RowParallel(8, 6, True, Mesh(tp=Axis(rank, 2)), SCHEME, "o")
        entries = layer.entries()
        assert entries.keys() == {"o.weight", "o.bias"}
        entries["o.weight"].load(MemoryWeight("o.weight", weight))
        entries["o.bias"].load(MemoryWeight("o.bias", bias))
        layer.finish()
        total += layer(x[:, 4 * rank : 4 * rank + 4])
    torch.testing.assert_close(total, x @ weight.t() + bias)
