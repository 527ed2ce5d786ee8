"""The device mesh that every layer is built with. With one rank, shards are whole and collectives are the identity."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh: this rank's place and the axis' length."""

    rank: int = 0
    size: int = 1

    def split(self, total: int, what: str) -> tuple[int, int]:
        """This rank's half-open range of `total` equal parts along the axis.

        Raises:
            ConfigError: `total` does not divide by the axis size. Names `what`.
        """
        if total % self.size:
            raise ConfigError(
                f"{what} is {total}, which {self.size} ranks cannot share evenly; use a size that divides it"
            )
        part = total // self.size
        return self.rank * part, (self.rank + 1) * part


@dataclass(frozen=True, slots=True)
class Mesh:
    """tp, dp and ep axes. Only meshes of one rank exist so far; layers already ask the axis for their shard."""

    tp: Axis = Axis()
    dp: Axis = Axis()
    ep: Axis = Axis()


SINGLE = Mesh()
