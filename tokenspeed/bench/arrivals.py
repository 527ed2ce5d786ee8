"""When sessions begin: Poisson or gamma arrivals at a constant or a rising rate. Seconds from the start, ascending."""

from __future__ import annotations

import math
import random
from typing import Literal

Strategy = Literal["linear", "exponential"]


def arrival_times(number: int, rates: list[float], burstiness: float, seed: int) -> list[float]:
    """Times of `number` arrivals.

    Args:
        rates: arrivals a second expected before each one (see `constant`, `ramp`); `inf` = at once.
        burstiness: shape of the gamma distribution of gaps; 1 = Poisson, less = burstier, more = more even.
    """
    assert len(rates) == number
    generator = random.Random(seed)
    now, times = 0.0, []
    for place, rate in enumerate(rates):
        if place and not math.isinf(rate):
            now += generator.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times


def constant(number: int, rate: float) -> list[float]:
    """The same rate throughout."""
    return [rate] * number


def ramp(number: int, start: float, end: float, strategy: Strategy) -> list[float]:
    """From `start` at the first arrival to `end` at the last, by equal steps or equal factors."""
    last = max(1, number - 1)
    if strategy == "linear":
        return [start + (end - start) * place / last for place in range(number)]
    return [start * (end / start) ** (place / last) for place in range(number)]
