"""Rotary position embedding: the table of cosines and sines that the qkv kernel reads (Su et al., arXiv 2104.09864).

The table is a function of the config alone. Frequencies are computed in float32 in the order that `transformers` uses,
so that a table differs from its by rounding of cos and sin at most.
"""

from __future__ import annotations

import math

import torch

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.protocol.errors import CheckpointError


class Rotary:
    """Holds the table; shared by all layers of a model.

    Raises:
        CheckpointError: a rope that this version cannot compute. Names the value.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        if config.rope.partial_rotary_factor != 1.0:
            raise CheckpointError(
                f"partial_rotary_factor {config.rope.partial_rotary_factor} is not supported; only 1.0 (the whole head "
                "rotates) is"
            )
        if config.head_dim % 2:
            raise CheckpointError(f"head_dim {config.head_dim} is odd; rotary embedding needs pairs")
        self._frequencies, self._magnitude = inverse_frequencies(config)
        self._max_position = config.max_position
        self._device = device
        self._cos_sin: torch.Tensor | None = None

    @property
    def cos_sin(self) -> torch.Tensor:
        """[max_position, head_dim] float32, cos in the first half of the columns, sin in the second; after `finish`."""
        assert self._cos_sin is not None, "used before finish"
        return self._cos_sin

    def finish(self) -> None:
        """Build the table."""
        angles = torch.outer(torch.arange(self._max_position, dtype=torch.float32), self._frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * self._magnitude
        self._cos_sin = cos_sin.to(self._device)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Angle per position [head_dim / 2] float32, and the factor on cos and sin (1 except for YaRN)."""
    rope, dim = config.rope, config.head_dim
    if rope.kind == "linear":
        return _plain(rope.theta, dim) / rope.factor, 1.0
    if rope.kind == "dynamic":
        return _plain(_dynamic_theta(rope, dim, config.max_position), dim), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, dim), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return _plain(rope.theta, dim), 1.0


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(rope: RopeConfig, dim: int, max_position: int) -> float:
    """The base of dynamic NTK scaling, fixed for the longest context that is served.

    `transformers` recomputes the base from the length of the running sequence, which leaves earlier keys in a cache
    rotated by another base, and does not scale lengths up to the trained context. Here one table serves all lengths:
    with `max_position` at the trained context the two agree at every length; beyond it they agree for one sequence of
    `max_position` tokens.
    """
    trained = rope.original_max_position or max_position
    if max_position <= trained:
        return rope.theta
    return float(rope.theta * (rope.factor * max_position / trained - (rope.factor - 1)) ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    trained = _original_max_position(rope)
    frequencies = _plain(rope.theta, dim)
    waves = 2 * math.pi / frequencies
    blend = (trained / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long = waves > trained / rope.low_freq_factor
    is_short = waves < trained / rope.high_freq_factor
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): a ramp over dimensions between interpolated and kept waves."""
    trained = _original_max_position(rope)
    low = _dim_of_rotations(rope.beta_fast, rope.theta, dim, trained)
    high = _dim_of_rotations(rope.beta_slow, rope.theta, dim, trained)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; keeps the division finite
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_magnitude(rope)


def _dim_of_rotations(rotations: float, theta: float, dim: int, trained: int) -> float:
    """The dimension whose wave turns `rotations` times within the trained context."""
    return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_magnitude(rope: RopeConfig) -> float:
    """The factor on cos and sin: as given, else from mscale and mscale_all_dim, else 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _original_max_position(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise CheckpointError(f"rope type {rope.kind} needs original_max_position_embeddings in the model's config")
    return rope.original_max_position
