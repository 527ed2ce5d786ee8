"""What the weights of a model take once they are loaded, known from the headers of its files alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tokenspeed.loader.weights import CheckpointWeight
from tokenspeed.quantization.fp8_format import Fp8Source

LAYERS = "model.layers."


def kept_bytes(weights: Iterable[CheckpointWeight], dtype: torch.dtype, quantizes: bool) -> int:
    """Bytes on a GPU, at least: without scales and tables that a layer makes, and without what loading takes meanwhile.

    Args:
        weights: those that the model wants.
        dtype: of the model.
        quantizes: matrices of the layers become e4m3 as they load.
    """
    return sum(math.prod(weight.shape) * _item_bytes(weight, dtype, quantizes) for weight in weights)


def _item_bytes(weight: CheckpointWeight, dtype: torch.dtype, quantizes: bool) -> int:
    is_matrix = len(weight.shape) > 1 and weight.name.startswith(LAYERS)
    if weight.is_raw or isinstance(weight, Fp8Source) or (quantizes and is_matrix):
        return 1
    return dtype.itemsize
