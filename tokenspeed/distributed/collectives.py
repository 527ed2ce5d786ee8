"""Collectives along a mesh axis. An axis of one rank needs none: its all-reduce is the identity, not a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed.distributed.mesh import Axis
from tokenspeed.protocol.errors import ConfigError

AllReduce = Callable[[torch.Tensor], torch.Tensor]


def all_reduce(axis: Axis) -> AllReduce | None:
    """The sum over an axis, or None where there is nothing to sum.

    Raises:
        ConfigError: the axis has more than one rank; this version has no communication between ranks.
    """
    if axis.size > 1:
        raise ConfigError(f"a tensor-parallel size of {axis.size} is not available in this version; use 1")
    return None
