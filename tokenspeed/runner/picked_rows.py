"""What the device has to know of the rows that are drawn again: written into page-locked memory, sent by one copy.

The copy has a stream of its own, so it is over before the forward is that those rows wait for. Not here: which rows
those are (`drawing`), what a mask says (`grammar_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.kernels.slot_ops import PickedRows
from tokenspeed.kernels.upload import SideCopy, staging_buffer
from tokenspeed.sampling.edits import Positions

ALIGNED = 4
"""Numbers: kernels load 16 bytes at a time, and are compiled anew for addresses that are no multiples."""
ROW = 2 + 2 + 1
"""Numbers of a row besides its mask: two of int64, one of int32."""
PADDING = 4 * (ALIGNED - 1)
"""Numbers that the four columns of a group of rows lose at most."""


_Sides = tuple[NDArray[np.int32], torch.Tensor, torch.Tensor]
"""One piece of the host's memory, for numpy and as a tensor, and its like on the device."""


class PickedGroup:
    """Some rows, filled in and sent once.

        positions, int64 | places, int64 | slots | masks [n, ceil(V / 32)]      (each from a multiple of 16 bytes on)

    Fields:
        masks: to be filled in, [n, num_words] int32, page-locked.
    """

    def __init__(self, sides: _Sides, num_rows: int, num_words: int, copy: SideCopy) -> None:
        numbers, self._host, self._device = sides
        self._copy = copy
        self._num_rows, self._num_words = num_rows, num_words
        long = aligned(2 * num_rows)
        self._columns = (0, long, 2 * long, 2 * long + aligned(num_rows))
        positions, places, slots, masks = self._columns
        self._positions = numbers[positions : positions + 2 * num_rows].view(np.int64)
        self._places = numbers[places : places + 2 * num_rows].view(np.int64)
        self._slots = numbers[slots : slots + num_rows]
        self.masks: NDArray[np.int32] = numbers[masks:].reshape(num_rows, num_words)

    def name(self, rows: Sequence[int], slots: Sequence[int], positions: Positions) -> None:
        """Which they are: `rows` of a step whose rows have these slots and positions."""
        self._places[:] = rows
        self._slots[:] = [slots[row] for row in rows]
        self._positions[:] = [positions[row] for row in rows]

    def send(self) -> tuple[PickedRows, torch.Tensor]:
        """The rows and their masks on the device, for what is launched from now on on the current stream. Valid until
        the room is cleared."""
        self._copy(self._host, self._device)
        positions, places, slots, masks = self._columns
        count = self._num_rows
        rows = PickedRows(
            places=self._device[places : places + 2 * count].view(torch.int64),
            slots=self._device[slots : slots + count],
            positions=self._device[positions : positions + 2 * count].view(torch.int64),
        )
        return rows, self._device[masks:].view(count, self._num_words)


class PickedRoom:
    """Room for the rows that one step draws again, on both sides.

    Args:
        num_rows: as many as can be. Groups may be as small as one row.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        size = num_rows * (ROW + PADDING + self._num_words)
        self._host = staging_buffer(4 * size, device).view(torch.int32)
        self._numbers: NDArray[np.int32] = self._host.numpy()
        self._copy = SideCopy(device)
        has_two_sides = self._copy.is_beside
        self._device = torch.empty(size, dtype=torch.int32, device=device) if has_two_sides else self._host
        self._used = 0

    def clear(self) -> None:
        """All groups are free again: the device has done with them."""
        self._used = 0

    def take(self, num_rows: int, has_masks: bool) -> PickedGroup:
        """Room for a group of at least one row."""
        num_words = self._num_words if has_masks else 0
        begin = self._used
        end = begin + 2 * aligned(2 * num_rows) + aligned(num_rows) + num_rows * num_words
        self._used = aligned(end)
        sides = self._numbers[begin:end], self._host[begin:end], self._device[begin:end]
        return PickedGroup(sides, num_rows, num_words, self._copy)


def aligned(count: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-count // ALIGNED) * ALIGNED
