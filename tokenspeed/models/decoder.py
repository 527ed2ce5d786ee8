"""The pre-norm decoder that all families share; what differs between them is in `ModelConfig`.

    x = embed(ids)
    every layer:  x += attention(norm(x));  x += mlp(norm(x))
    hidden = norm(x);  scores = head(hidden)

The MLP of a layer is dense or sparse (experts), as the config says.
The residual stream fuses additions and norms with their neighbours, so the decode path consists of ops and views only
and can be recorded into a step graph.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch, LayerKV
from tokenspeed.cache.spec import LayerCacheSpec
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.attention import Attention
from tokenspeed.layers.embedding import Vocabulary
from tokenspeed.layers.entry import Entries, Layer, join
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import SparseMLP
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import Rotary
from tokenspeed.layers.stream import Normed, Out, ResidualStream
from tokenspeed.models.interface import LoadRule
from tokenspeed.moe.dispatch import LocalDispatch
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme


class FeedForward(Layer, Protocol):
    """What `GatedMLP` and `SparseMLP` have in common; what passes from the call to `out` is their own affair."""

    @property
    def out(self) -> Out[Any]: ...

    @property
    def max_fused_rows(self) -> int: ...

    def __call__(self, x: torch.Tensor | Normed) -> Any: ...


class DecoderLayer:
    """Attention and MLP, each behind a norm, on a residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        scheme: Scheme,
        ops: Ops,
        backend: AttentionBackend,
        moe: SelectedMoe | None,
        rotary: Rotary,
        layer: int,
    ) -> None:
        prefix = f"model.layers.{layer}"
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(config.hidden_size, eps, ops, f"{prefix}.input_layernorm")
        self.attention = Attention(config, mesh, scheme, ops, backend, rotary, layer, f"{prefix}.self_attn")
        self.post_norm = RMSNorm(config.hidden_size, eps, ops, f"{prefix}.post_attention_layernorm")
        self.mlp: FeedForward
        if config.moe is None or layer in config.moe.dense_layers:
            self.mlp = GatedMLP(config, mesh, scheme, ops, f"{prefix}.mlp")
        else:
            assert moe is not None, "a model with expert layers is built with a MoE backend"
            self.mlp = SparseMLP(config, mesh, scheme, ops, moe, LocalDispatch(mesh), f"{prefix}.mlp")
        self._parts: tuple[Layer, ...] = (self.input_norm, self.attention, self.post_norm, self.mlp)

    def entries(self) -> Entries:
        return join(part.entries() for part in self._parts)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which the whole layer can fuse with its neighbours."""
        return min(self.attention.max_fused_rows, self.mlp.max_fused_rows)

    def __call__(
        self,
        stream: ResidualStream,
        positions: torch.Tensor,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Adds the layer's two sublayers to the stream; `wanted` [N] keeps those tokens alone once all attended."""
        attended = self.attention(stream.normed(self.input_norm), positions, batch)
        if wanted is not None:
            attended = attended[wanted]
            stream.keep(wanted)
        stream.add(self.attention.out, attended)
        stream.add(self.mlp.out, self.mlp(stream.normed(self.post_norm)))


class Decoder:
    """Satisfies `Model`. Families subclass it to state their name and to check what their config must say.

    Args:
        moe: what runs the experts; None in a model without expert layers.
    Raises:
        CheckpointError: the config contradicts its family.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        scheme: Scheme,
        ops: Ops,
        backend: AttentionBackend,
        moe: SelectedMoe | None = None,
    ) -> None:
        contradiction = self.contradiction(config)
        if contradiction is not None:
            raise CheckpointError(contradiction)
        self._vocabulary = Vocabulary(config, mesh, scheme, ops, "model.embed_tokens", "lm_head")
        self._rotary = Rotary(config, ops.device)
        self._layers = [
            DecoderLayer(config, mesh, scheme, ops, backend, moe, self._rotary, layer)
            for layer in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, "model.norm")
        self._parts: tuple[Layer, ...] = (self._vocabulary, *self._layers, self._norm)
        self._entries = join(part.entries() for part in self._parts)
        self._max_fused_rows = 0

    @staticmethod
    def contradiction(config: ModelConfig) -> str | None:
        """What every config of the family says and this one does not, in words; None when it fits."""
        return None

    def load_rules(self) -> dict[str, LoadRule]:
        """See `Model.load_rules`."""
        return {name: entry.load for name, entry in self._entries.items()}

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Model.expected_shapes`."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def raw_names(self) -> frozenset[str]:
        """See `Model.raw_names`."""
        return frozenset(name for name, entry in self._entries.items() if entry.is_raw)

    def ignorable(self, name: str) -> bool:
        """Rotary tables of old checkpoints, and the head of a tied model."""
        return name.endswith(".rotary_emb.inv_freq") or self._vocabulary.ignorable(name)

    def finish(self) -> None:
        """See `Model.finish`."""
        self._rotary.finish()
        for part in self._parts:
            part.finish()
        self._max_fused_rows = min(layer.max_fused_rows for layer in self._layers)

    def cache_specs(self) -> list[LayerCacheSpec]:
        """See `Model.cache_specs`."""
        return [layer.attention.cache_spec for layer in self._layers]

    def bind_kv(self, pool: list[LayerKV]) -> None:
        """See `Model.bind_kv`."""
        assert len(pool) == len(self._layers), f"{len(pool)} pools for {len(self._layers)} layers"
        for layer, kv in zip(self._layers, pool, strict=True):
            layer.attention.bind_kv(kv)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        stream = ResidualStream(self._vocabulary.embed(token_ids), fuse=token_ids.shape[0] <= self._max_fused_rows)
        for layer in self._layers[:-1]:
            layer(stream, positions, batch)
        self._layers[-1](stream, positions, batch, wanted)
        return stream.final(self._norm)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.head`."""
        return self._vocabulary.head(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden).float()
