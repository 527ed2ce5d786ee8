"""Rotary embedding as a config states it: every spelling that HF configs and GGUF files use, in one form. No torch."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from tokenspeed.config.fields import Fields
from tokenspeed.protocol.errors import CheckpointError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
DEFAULT_THETA = 10000.0


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. `kind` picks which of the other fields count.

    Fields:
        kind: default, linear, dynamic, yarn or llama3 (names of `rope_scaling.rope_type` in HF configs).
        theta: base.
        factor: length extension factor.
        original_max_position: context the model was trained with before the extension.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: YaRN (arXiv 2309.00071).
        low_freq_factor, high_freq_factor: llama3.
        partial_rotary_factor: share of head_dim that rotates.
    """

    kind: RopeKind = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0


def read_rope(config: Fields) -> tuple[RopeConfig, int]:
    """The rope of an HF config and the longest position it serves.

    transformers 5 writes everything into `rope_parameters`; before, the base stood in `rope_theta` and the rest in
    `rope_scaling`, whose kind was first spelled `type` and later `rope_type`.

    Returns:
        The rope, and the context: `max_position_embeddings`, or what linear and yarn extend it to. Dynamic scaling is
        not counted: up to the trained length it equals the plain rope, beyond it the base depends on the longest length
        served, so a longer `max_position_embeddings` has to be asked for (with `original_max_position_embeddings`).

    Raises:
        CheckpointError: a kind that is not supported, or a field that is missing or cannot be.
    """
    max_position = config.integer("max_position_embeddings")
    section = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = _section(config, section)
    kind = _kind(rope)
    theta = config.number("rope_theta", default=DEFAULT_THETA, minimum=1.0)
    theta = rope.number("rope_theta", default=theta, minimum=1.0)
    partial = rope.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0))
    if kind == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial), max_position
    trained = _trained_length(rope, config, kind, max_position)
    factor = _factor(rope, kind, max_position, trained)
    result = RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=trained or max_position,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale", minimum=-1.0),
        mscale_all_dim=rope.optional_number("mscale_all_dim", minimum=-1.0),
        truncate=rope.flag("truncate", True),
        low_freq_factor=rope.number("low_freq_factor", default=1.0),
        high_freq_factor=rope.number("high_freq_factor", default=4.0),
        partial_rotary_factor=partial,
    )
    if kind == "llama3" and result.high_freq_factor <= result.low_freq_factor:
        raise rope.bad("high_freq_factor", f"more than low_freq_factor, which is {result.low_freq_factor:g}")
    if kind in ("linear", "yarn"):
        max_position = max(max_position, math.floor((trained or max_position) * factor))
    return result, max_position


def _section(config: Fields, name: str) -> Fields:
    value: Any = config.get(name)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise config.bad(name, "an object")
    if value and all(isinstance(item, dict) for item in value.values()):
        raise CheckpointError(
            f"{config.where}: {name} has one rope for each layer type ({', '.join(value)}); only one rope "
            "for all layers is supported"
        )
    return Fields(config.where, value, f"{name}.")


def _kind(rope: Fields) -> RopeKind:
    name = "rope_type" if rope.get("rope_type") is not None else "type"
    value = rope.get(name)
    if value is None:
        if rope.get("factor") is not None:
            raise rope.missing("rope_type", f"one of {', '.join(KINDS)}")
        return "default"
    for kind in KINDS:
        if value == kind:
            return kind
    raise rope.bad(name, f"one of {', '.join(KINDS)}")


def _trained_length(rope: Fields, config: Fields, kind: RopeKind, max_position: int) -> int | None:
    """The length before the extension, when the config tells it."""
    name = "original_max_position_embeddings"
    for fields in (rope, config):
        if fields.get(name) is not None:
            return fields.integer(name)
    if kind == "llama3":
        raise rope.missing(name, "the trained context length of the llama3 rope")
    return None


def _factor(rope: Fields, kind: RopeKind, max_position: int, trained: int | None) -> float:
    if rope.get("factor") is None and kind == "yarn" and trained is not None:
        return max_position / trained
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.bad("factor", "1 or more")
    return factor


def llama3_from_factors(factors: list[float], theta: float, where: str) -> dict[str, Any]:
    """The llama3 `rope_scaling` object that gives the per-frequency divisors a GGUF file stores as `rope_freqs.weight`.

    The llama3 rule divides frequency i, of wavelength w, by
        1                                        where  w < L / high
        factor                                   where  w > L / low
        1 / ((1 - s) / factor + s)               between,  s = (L / w - low) / (high - low)
    It depends on L, low and high only through L / low and L / high, so low = 1 may be chosen and the other two follow
    from a straight line through s at two frequencies. Released models (L 8192, low 1, high 4) are tried first: they
    come out with their published numbers. The numbers found have to give back every divisor, else it is an error.

    Args:
        factors: divisors, [head_dim / 2].
        theta: rope base.
        where: file and tensor, for errors.

    Returns:
        An HF rope_scaling object, or {} when all divisors are 1.
    """
    if any(not math.isfinite(factor) or factor <= 0 for factor in factors):
        raise CheckpointError(f"{where}: holds divisors that are not positive numbers; the file is damaged")
    if all(abs(factor - 1.0) < 1e-6 for factor in factors):
        return {}
    dim = 2 * len(factors)
    waves = [2 * math.pi * theta ** (2 * i / dim) for i in range(len(factors))]
    factor = max(factors)
    candidates = [(8192.0, 4.0), *_fit_line(factors, waves, factor)]
    for length, high in candidates:
        rebuilt = [_llama3_divisor(wave, length, high, factor) for wave in waves]
        if all(abs(a - b) <= 1e-3 * b for a, b in zip(rebuilt, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": round(length),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
            }
    raise CheckpointError(
        f"{where}: its divisors {factors[0]:g} ... {factors[-1]:g} do not follow the llama3 "
        "rule, the only one supported for this tensor"
    )


def _fit_line(factors: list[float], waves: list[float], factor: float) -> list[tuple[float, float]]:
    """(L, high) from two blended frequencies, at most one pair."""
    points = [
        (1 / wave, (1 / f - 1 / factor) / (1 - 1 / factor))
        for f, wave in zip(factors, waves, strict=True)
        if 1.001 < f < 0.999 * factor
    ]
    if len(points) < 2:
        return []
    (x1, s1), (x2, s2) = points[0], points[-1]
    slope = (s1 - s2) / (x1 - x2)
    zero = x1 - s1 / slope if slope > 0 else 0.0
    # s = 0 at w = L (low is 1), s = 1 at w = L / high.
    return [(1 / zero, (zero + 1 / slope) / zero)] if zero > 0 else []


def _llama3_divisor(wave: float, length: float, high: float, factor: float) -> float:
    if wave < length / high:
        return 1.0
    if wave > length:
        return factor
    blend = (length / wave - 1) / (high - 1)
    return 1 / ((1 - blend) / factor + blend)
