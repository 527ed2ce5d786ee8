"""The sparse MLP: router, dispatch, experts. `out`, the experts, is applied by the residual stream.

    h = norm(x);  ids, weights = route(h);  x += sum over k of weights[k] * expert[ids[k]](h)

Router, dispatch and experts know nothing of each other, so that the tokens of several ranks can be exchanged between
the first two and brought back after the third.
"""

from __future__ import annotations

import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.config.moe import MoeConfig
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.layers.entry import Entries, Entry, join, read_exact
from tokenspeed.layers.expert_weights import ExpertLoad
from tokenspeed.layers.stream import Normed
from tokenspeed.moe.interface import Dispatch, Experts, Routed, RouterRule
from tokenspeed.moe.select import SelectedMoe
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import Scheme, WeightTensor


class Router:
    """Scores every expert for every token and keeps the best.

    Args:
        name: HF name without `.weight`.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig, ops: Ops, name: str) -> None:
        assert ops.route is not None, "selected a MoE backend without a router"
        self._shape = (moe.num_experts, hidden_size)
        self._has_bias = moe.router_bias
        self._rule = RouterRule(moe.top_k, moe.scoring, moe.renormalize)
        self._ops = ops
        self._route = ops.route
        self._name = name
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def entries(self) -> Entries:
        """The weight [E, H], and the bias [E] where there is one; in the model's dtype, on every rank."""
        wanted: Entries = {f"{self._name}.weight": Entry(self._shape, self._load)}
        if self._has_bias:
            wanted[f"{self._name}.bias"] = Entry(self._shape[:1], self._load_bias)
        return wanted

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: weight or bias never came.
        """
        for tensor, name in ((self._weight, "weight"), (self._bias, "bias" if self._has_bias else None)):
            if tensor is None and name is not None:
                raise CheckpointError(f"{self._name}.{name} was not in the checkpoint")

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which the norm may be left to it, see `ops.Route`."""
        return self._route.max_fused_rows

    def __call__(self, x: torch.Tensor | Normed) -> Routed:
        """x [T, H], or its norm left to do."""
        assert self._weight is not None, "used before finish"
        if isinstance(x, Normed):
            norm = x.norm
            return Routed(*self._route(x.x, self._weight, self._bias, self._rule, norm=norm.weight, eps=norm.eps))
        return Routed(*self._route(x, self._weight, self._bias, self._rule))

    def _load(self, weight: WeightTensor) -> None:
        self._weight = read_exact(weight, self._shape, self._ops)

    def _load_bias(self, bias: WeightTensor) -> None:
        self._bias = read_exact(bias, self._shape[:1], self._ops)


class ExpertsOut:
    """The experts of one layer as the end of a sublayer. Satisfies `stream.Out`."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._experts: Experts | None = None

    def bind(self, experts: Experts) -> None:
        """After the load."""
        self._experts = experts

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which `add_to` costs no launch of its own; 0 where partial results must be summed first."""
        assert self._experts is not None, "used before finish"
        return self._experts.max_fused_rows if self._dispatch.can_add else 0

    def __call__(self, routed: Routed) -> torch.Tensor:
        """The weighted sum of each token's experts, a new [T, H]."""
        assert self._experts is not None, "used before finish"
        here = self._dispatch.send(routed)
        return self._dispatch.collect(self._experts(here.x, here.routing))

    def add_to(self, stream: torch.Tensor, routed: Routed) -> None:
        """stream [T, H] += the same, in place."""
        assert self._experts is not None and self._dispatch.can_add, "add_to beyond max_fused_rows"
        here = self._dispatch.send(routed)
        self._experts(here.x, here.routing, stream)


class SparseMLP:
    """x [T, H] -> its norm and its experts, which `out` applies.

    Args:
        prefix: HF name of the module (`model.layers.3.mlp`).
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        scheme: Scheme,
        ops: Ops,
        selected: SelectedMoe,
        dispatch: Dispatch,
        prefix: str,
    ) -> None:
        assert config.moe is not None, "a dense model has no expert layers"
        self._router = Router(config.hidden_size, config.moe, ops, f"{prefix}.{config.moe.router}")
        self._load = ExpertLoad(config.moe, mesh, selected.need, scheme, ops, f"{prefix}.experts")
        self._name = f"{prefix}.experts"
        self._selected = selected
        self.out = ExpertsOut(dispatch)

    def entries(self) -> Entries:
        return join((self._router.entries(), self._load.entries()))

    def finish(self) -> None:
        """
        Raises:
            CheckpointError: a tensor never came, or holds what the backend does not take.
        """
        self._router.finish()
        weights = self._load.take()
        try:
            self.out.bind(self._selected.backend.pack(weights, self._selected.need))
        except CheckpointError as error:
            raise CheckpointError(f"{self._name}: {error}") from error

    @property
    def max_fused_rows(self) -> int:
        """Rows up to which norm and residual addition may be left to it. The addition then costs no launch of its own;
        the norm may, where rows are more than the router takes at once."""
        return min(self._router.max_fused_rows, self.out.max_fused_rows)

    def __call__(self, x: torch.Tensor | Normed) -> Routed:
        """x, or its norm left to do."""
        return self._router(x)
