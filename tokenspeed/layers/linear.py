"""Linear layers that own their shard of the weight and the rules that load it.

Column-parallel layers keep a range of output rows a rank, row-parallel layers a range of input columns and sum the
partial results (Shoeybi et al. 2019, arXiv 1909.08053). How the weight is stored is the scheme's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.collectives import all_reduce
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.layers.entry import Entries, Entry
from tokenspeed.quantization.interface import LinearShape, Scheme, WeightTensor


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor inside a merged weight.

    Fields:
        name: HF name without `.weight`.
        out_features: its rows, over all ranks.
        unit: rows that stay together (head_dim for attention heads).
    """

    name: str
    out_features: int
    unit: int = 1


LoadRule = Callable[[WeightTensor], None]


class MergedColumnParallel:
    """Several linears of one input in one matmul: y = [x W1^T, x W2^T, ...], outputs of this rank only.

    rows of the merged weight:  [0, a) part 0's shard | [a, b) part 1's shard | ...
    """

    def __init__(
        self, in_features: int, parts: Sequence[Part], has_bias: bool, mesh: Mesh, scheme: Scheme, prefix: str
    ) -> None:
        self._in_features = in_features
        self._parts = tuple(parts)
        self._has_bias = has_bias
        self._rows: list[tuple[int, int]] = []
        self._row_starts: list[int] = []
        out_features = 0
        for part in self._parts:
            first, last = mesh.tp.split(part.out_features // part.unit, f"the number of output units of {part.name}")
            self._rows.append((first * part.unit, last * part.unit))
            self._row_starts.append(out_features)
            out_features += (last - first) * part.unit
        self.out_features = out_features
        self._method = scheme.declare(LinearShape(in_features, out_features, has_bias, prefix))

    def entries(self) -> Entries:
        """Weights [out, in], and biases [out] where the layer has them."""
        wanted: Entries = {}
        for index, part in enumerate(self._parts):
            shape = (part.out_features, self._in_features)
            wanted[f"{part.name}.weight"] = Entry(shape, self._weight_rule(index))
            if self._has_bias:
                wanted[f"{part.name}.bias"] = Entry(shape[:1], self._bias_rule(index))
        return wanted

    def finish(self) -> None:
        self._method.finish()

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which `fused` serves; 0 = never."""
        return self._method.max_fused_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features of this rank]."""
        return self._method.apply(x)

    def fused(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool = False) -> torch.Tensor:
        """The linear of RMSNorm(x), T <= max_fused_rows; gated: two parts of equal size, silu(first) * second."""
        return self._method.apply_fused(x, norm=norm, eps=eps, gated=gated)

    def _weight_rule(self, index: int) -> LoadRule:
        return lambda weight: self._method.load(weight, self._row_starts[index], None, self._shard(index))

    def _bias_rule(self, index: int) -> LoadRule:
        return lambda bias: self._method.load_bias(bias, self._row_starts[index], self._shard(index))

    def _shard(self, index: int) -> tuple[int, int] | None:
        """This rank's rows of a part; None when that is all of them."""
        rows = self._rows[index]
        return None if rows == (0, self._parts[index].out_features) else rows


class QKVParallel(MergedColumnParallel):
    """Queries, keys and values of an attention layer in one matmul, sharded by whole heads."""

    def __init__(self, config: ModelConfig, mesh: Mesh, scheme: Scheme, prefix: str) -> None:
        head_dim = config.head_dim
        parts = (
            Part(f"{prefix}.q_proj", config.num_heads * head_dim, head_dim),
            Part(f"{prefix}.k_proj", config.num_kv_heads * head_dim, head_dim),
            Part(f"{prefix}.v_proj", config.num_kv_heads * head_dim, head_dim),
        )
        super().__init__(config.hidden_size, parts, config.attention_bias, mesh, scheme, f"{prefix}.qkv_proj")


class RowParallel:
    """One linear, sharded by input columns; partial results are summed over the tensor-parallel axis."""

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, mesh: Mesh, scheme: Scheme, name: str
    ) -> None:
        self._in_features = in_features
        self._out_features = out_features
        self._columns = mesh.tp.split(in_features, f"the number of input columns of {name}")
        self._has_bias = has_bias
        self._name = name
        self._all_reduce = all_reduce(mesh.tp)
        num_columns = self._columns[1] - self._columns[0]
        self._adds_bias = has_bias and mesh.tp.rank == 0  # one rank, or the sum would hold it once a rank
        self._method = scheme.declare(LinearShape(num_columns, out_features, self._adds_bias, name))

    def entries(self) -> Entries:
        """The weight [out, in], and the bias [out] where the layer has one: every rank asks, the first keeps it."""
        whole = self._columns == (0, self._in_features)
        columns = None if whole else self._columns
        wanted: Entries = {
            f"{self._name}.weight": Entry(
                (self._out_features, self._in_features), lambda weight: self._method.load(weight, 0, columns, None)
            )
        }
        if self._has_bias:
            wanted[f"{self._name}.bias"] = Entry((self._out_features,), self._load_bias)
        return wanted

    def _load_bias(self, bias: WeightTensor) -> None:
        if self._adds_bias:
            self._method.load_bias(bias, 0, None)

    def finish(self) -> None:
        self._method.finish()

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which `add_to` serves; never where partial results must be summed over ranks first."""
        return self._method.max_fused_rows if self._all_reduce is None else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features of this rank] -> [T, out_features], summed over ranks."""
        y = self._method.apply(x)
        return y if self._all_reduce is None else self._all_reduce(y)

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """stream [T, out_features] += the linear of x, in place and in one launch; T <= max_fused_rows."""
        self._method.apply_fused(x, residual=stream)
