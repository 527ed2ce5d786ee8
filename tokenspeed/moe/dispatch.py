"""Tokens to the ranks that hold their experts, and results back."""

from __future__ import annotations

import torch

from tokenspeed.distributed.collectives import all_reduce
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.moe.interface import Routed
from tokenspeed.protocol.errors import ConfigError


class LocalDispatch:
    """Every rank has a part of every expert: tokens stay, partial results are summed over the tensor-parallel axis.
    Satisfies `Dispatch`.

    Raises:
        ConfigError: the mesh spreads experts over ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        if mesh.ep.size > 1:
            raise ConfigError(f"an expert-parallel size of {mesh.ep.size} is not available in this version; use 1")
        self._all_reduce = all_reduce(mesh.tp)

    @property
    def can_add(self) -> bool:
        """See `Dispatch.can_add`."""
        return self._all_reduce is None

    def send(self, routed: Routed) -> Routed:
        """See `Dispatch.send`."""
        return routed

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """See `Dispatch.collect`."""
        return y if self._all_reduce is None else self._all_reduce(y)
