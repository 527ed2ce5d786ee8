"""Sequences in the order of their keys. Adding and removing cost a binary search and a short move."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tokenspeed.scheduler.policy import OrderKey
from tokenspeed.scheduler.request import Sequence


def _key(sequence: Sequence) -> OrderKey:
    return sequence.key


class OrderedQueue:
    """Sequences sorted by `key`, which no two share."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, position: int) -> Sequence:
        return self._items[position]

    def add(self, sequence: Sequence) -> None:
        """Put the sequence in its place."""
        if not self._items or self._items[-1].key < sequence.key:
            self._items.append(sequence)
        else:
            insort(self._items, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Take the sequence out.

        Raises:
            ValueError: it is not here (a bug of the scheduler).
        """
        position = bisect_left(self._items, sequence.key, key=_key)
        if position == len(self._items) or self._items[position] is not sequence:
            raise ValueError(f"sequence {sequence.key} is not in this queue")
        del self._items[position]
