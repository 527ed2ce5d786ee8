"""The residual stream of one forward, and how the additions and norms along it are fused.

    every sublayer:  stream += sublayer(norm(stream))

Many rows: memory traffic counts. What a sublayer leaves to add is kept aside, and the norm that follows adds it in the
same pass (add + RMSNorm). Few rows: launches count. The sublayer's last linear adds into the stream itself, and the
norm is left to the linear that reads it (`Normed`). Models are written against `normed` and `add` and do not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from tokenspeed.layers.norm import RMSNorm

Y = TypeVar("Y")
Y_contra = TypeVar("Y_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Normed:
    """The norm of x, [T, H], to be computed by the linear or router that reads it."""

    x: torch.Tensor
    norm: RMSNorm


class Out(Protocol[Y_contra]):
    """The end of a sublayer: a linear, or the experts of a sparse layer."""

    def __call__(self, y: Y_contra, /) -> torch.Tensor:
        """What the stream gains, a new [T, H]."""
        ...

    def add_to(self, stream: torch.Tensor, y: Y_contra, /) -> None:
        """stream [T, H] += the same, in place and without a launch of its own; only for few rows."""
        ...


class ResidualStream:
    """[T, H], updated in place.

    Args:
        x: the embedded tokens; becomes the stream's own buffer.
        fuse: few rows: let linears add and normalise.
    """

    def __init__(self, x: torch.Tensor, fuse: bool) -> None:
        self._x = x
        self._fuse = fuse
        self._left_to_add: torch.Tensor | None = None

    def normed(self, norm: RMSNorm) -> torch.Tensor | Normed:
        """The norm of everything added so far, as a linear of the next sublayer takes it."""
        return Normed(self._x, norm) if self._fuse else self.final(norm)

    def add(self, out: Out[Y], y: Y) -> None:
        """stream += out(y); y is what the sublayer left for its end."""
        assert self._left_to_add is None, "a sublayer starts from normed()"
        if self._fuse:
            out.add_to(self._x, y)
        else:
            self._left_to_add = out(y)

    def keep(self, rows: torch.Tensor) -> None:
        """From now on the stream consists of these rows of it, [N] int64. Before the next `add`."""
        assert self._left_to_add is None, "a sublayer starts from normed()"
        self._x = self._x[rows]

    def final(self, norm: RMSNorm) -> torch.Tensor:
        """The norm of everything added so far, [T, H]."""
        if self._left_to_add is None:
            return norm(self._x)
        y = norm.add(self._left_to_add, self._x)
        self._left_to_add = None
        return y
