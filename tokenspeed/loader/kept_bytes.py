"""What the weights of a model take once they are loaded, known from the headers of its files alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tokenspeed.loader.weights import CheckpointWeight
from tokenspeed.quantization.fp8_format import Fp8Source

LAYERS = "model.layers."
EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Kept:
    """What becomes of weights.

    Fields:
        dtype: of the model, and of what is not kept otherwise.
        quantizes: matrices of the layers become e4m3 as they load.
        linears_in_e4m3: what is or becomes e4m3 of linears stays so; else it is widened.
        experts_in_e4m3: likewise.
    """

    dtype: torch.dtype
    quantizes: bool = False
    linears_in_e4m3: bool = True
    experts_in_e4m3: bool = True


def kept_bytes(weights: Iterable[CheckpointWeight], kept: Kept) -> int:
    """Bytes on a GPU, at least: without scales and tables that a layer makes, and without what loading takes meanwhile.

    Args:
        weights: those that the model wants.
    """
    return sum(math.prod(weight.shape) * _item_bytes(weight, kept) for weight in weights)


def _item_bytes(weight: CheckpointWeight, kept: Kept) -> int:
    is_matrix = len(weight.shape) > 1 and weight.name.startswith(LAYERS)
    if weight.is_raw:
        return 1
    stays = kept.experts_in_e4m3 if EXPERTS in weight.name else kept.linears_in_e4m3
    if stays and (isinstance(weight, Fp8Source) or (kept.quantizes and is_matrix)):
        return 1
    return kept.dtype.itemsize
