"""What a layer wants from a checkpoint: for each tensor name its whole shape and what to do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed.kernels.ops import Ops
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.interface import WeightTensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint tensor.

    Fields:
        shape: logical shape of the whole tensor, not of this rank's part.
        load: puts the tensor, or this rank's part of it, in its place.
        is_raw: its bytes are read as they are (uint8), not numbers.
    """

    shape: tuple[int, ...]
    load: Callable[[WeightTensor], None]
    is_raw: bool = False


Entries = dict[str, Entry]


class Layer(Protocol):
    """Anything that takes part in a load."""

    def entries(self) -> Entries:
        """What it wants; the same answer each time."""
        ...

    def finish(self) -> None:
        """After the last load. Raises CheckpointError when something never came."""
        ...


def join(parts: Iterable[Entries]) -> Entries:
    """The union. Two layers that want one name are a bug of the model file."""
    joined: Entries = {}
    for part in parts:
        clash = joined.keys() & part.keys()
        assert not clash, f"checkpoint names wanted twice: {sorted(clash)}"
        joined.update(part)
    return joined


def read_exact(weight: WeightTensor, shape: tuple[int, ...], ops: Ops) -> torch.Tensor:
    """The tensor in the model's dtype on its device.

    Raises:
        CheckpointError: its shape is another one.
    """
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"{weight.where}: shape {list(weight.shape)}, expected {list(shape)}")
    return weight.read(ops.dtype, ops.device)
