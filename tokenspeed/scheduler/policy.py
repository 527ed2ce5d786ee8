"""Who goes first: a sort key per sequence, smaller = earlier. Admission takes the smallest, preemption the largest."""

from __future__ import annotations

from typing import Literal

Policy = Literal["fifo", "priority"]
OrderKey = tuple[int, int, int]


def order_key(policy: Policy, priority: int, arrival: int, index: int) -> OrderKey:
    """The sequence's place: under `priority` the lower number first; ties, and everything under `fifo`, by arrival.

    Args:
        arrival: position of the request among all requests that were added.
        index: of the sequence inside its request.
    """
    return (priority if policy == "priority" else 0, arrival, index)
