"""Grouped-query attention over the paged cache: project, rotate and store, attend; `out` projects back.

Layers with a sliding window keep their pages in a cache group of their own, which forgets what no window reaches.
"""

from __future__ import annotations

import torch

from tokenspeed.attention.interface import AttentionBackend, AttentionBatch, LayerKV
from tokenspeed.cache.spec import LayerCacheSpec
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, Entry, Layer, join
from tokenspeed.layers.linear import QKVParallel, RowParallel
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import Rotary
from tokenspeed.layers.stream import Normed
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme, WeightTensor

FULL_GROUP = "full"
SLIDING_GROUP = "sliding"


def group_index(config: ModelConfig, layer: int) -> int:
    """Place of a layer's cache group among those of the model: in order of first appearance, as the cache counts."""
    windows = config.layer_windows
    return 0 if not windows or (windows[layer] is None) == (windows[0] is None) else 1


class Sinks:
    """A learned logit of each head, [heads of this rank] float32, that joins the softmax's denominator (GPT-OSS).

    Args:
        name: as the checkpoint has it.
    """

    def __init__(self, num_heads: int, mesh: Mesh, ops: Ops, name: str) -> None:
        self._num_heads = num_heads
        self._mine = slice(*mesh.tp.split(num_heads, "num_attention_heads"))
        self._ops = ops
        self._name = name
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """After the load."""
        assert self._values is not None, "used before finish"
        return self._values

    def entries(self) -> Entries:
        return {self._name: Entry((self._num_heads,), self._load)}

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: they never came.
        """
        if self._values is None:
            raise CheckpointError(f"{self._name} was not in the checkpoint")

    def _load(self, weight: WeightTensor) -> None:
        if tuple(weight.shape) != (self._num_heads,):
            raise CheckpointError(f"{weight.where}: shape {list(weight.shape)}, expected {[self._num_heads]}")
        self._values = weight.read(torch.float32, self._ops.device)[self._mine].contiguous()


class Attention:
    """One layer's attention up to its output projection `out`, which the residual stream applies and adds.

    Keys and values live in the pool given by `bind_kv`.

    Args:
        layer: layer index, for the cache spec.
        prefix: HF name of the module (`model.layers.3.self_attn`).
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        scheme: Scheme,
        ops: Ops,
        backend: AttentionBackend,
        rotary: Rotary,
        layer: int,
        prefix: str,
    ) -> None:
        heads, head_dim = config.num_heads, config.head_dim
        self._qkv = QKVParallel(config, mesh, scheme, prefix)
        self.out = RowParallel(heads * head_dim, config.hidden_size, config.o_bias, mesh, scheme, f"{prefix}.o_proj")
        self._q_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, f"{prefix}.q_norm") if config.qk_norm else None
        self._k_norm = RMSNorm(head_dim, config.rms_norm_eps, ops, f"{prefix}.k_norm") if config.qk_norm else None
        self._sinks = Sinks(heads, mesh, ops, f"{prefix}.sinks") if config.attention_sinks else None
        self._eps = config.rms_norm_eps
        self._scale = head_dim**-0.5
        self._logit_cap = config.attention_logit_cap
        self._ops = ops
        self._backend = backend
        self._rotary = rotary
        self._kv: LayerKV | None = None
        self._kv_scales: tuple[float, ...] = ()
        first, last = mesh.tp.split(config.num_kv_heads, "num_key_value_heads")
        bytes_per_token = 2 * (last - first) * head_dim * ops.kv_dtype.itemsize
        self._window = config.layer_windows[layer] if config.layer_windows else None
        self._group = group_index(config, layer)
        if self._window is None:
            self.cache_spec = LayerCacheSpec(layer, FULL_GROUP, "full", bytes_per_token)
        else:
            self.cache_spec = LayerCacheSpec(layer, SLIDING_GROUP, "sliding_window", bytes_per_token, self._window)
        extras = (self._q_norm, self._k_norm, self._sinks)
        self._parts: tuple[Layer, ...] = (self._qkv, self.out, *(part for part in extras if part is not None))

    def entries(self) -> Entries:
        return join(part.entries() for part in self._parts)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def bind_kv(self, kv: LayerKV) -> None:
        """Use these pages from now on."""
        self._kv = kv
        # Only an 8-bit pool has scales; CPU kernels that know none need not know these either.
        self._kv_scales = () if (kv.k_scale, kv.v_scale) == (1.0, 1.0) else (kv.k_scale, kv.v_scale)

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which the projections may fuse with norm and stream."""
        return min(self._qkv.max_fused_rows, self.out.max_fused_rows)

    def __call__(self, x: torch.Tensor | Normed, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """x, or its norm left to do, [T, H]; positions [T] int64 -> what `out` takes, [T, heads * head_dim].

        Writes this step's keys and values to the slots that the batch has for this layer's cache group.
        """
        assert self._kv is not None, "forward before bind_kv"
        batch = batch.group(self._group)
        sinks = None if self._sinks is None else self._sinks.values
        qkv = self._qkv.fused(x.x, x.norm.weight, x.norm.eps) if isinstance(x, Normed) else self._qkv(x)
        q = self._ops.qkv_rope_cache(
            qkv,
            positions,
            self._rotary.cos_sin,
            self._kv.keys,
            self._kv.values,
            batch.slots,
            None if self._q_norm is None else self._q_norm.weight,
            None if self._k_norm is None else self._k_norm.weight,
            self._eps,
            *self._kv_scales,
        )
        return self._backend.run(q, self._kv, batch, self._scale, self._window, sinks, self._logit_cap)
