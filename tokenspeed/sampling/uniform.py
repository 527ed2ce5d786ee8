"""Random numbers that are functions of (seed, position): no state, no order, no batch.

The function is splitmix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)
applied to the seed, then to the sum with the position. Computed in Python integers, so that every device and every
version draws the same.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: any 64-bit integer, signed or not.
        position: of the token to draw, counted from the start of its sequence.
    """
    key = _mix((seed & _MASK) + _GOLDEN)
    return (_mix(key + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
