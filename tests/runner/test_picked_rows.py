"""Rows that are drawn again, on their way to the device: whole, aligned, none in another's room."""

from __future__ import annotations

import random

import pytest
import torch
from late_device import OVERWRITTEN, late_device

from tokenspeed.runner.picked_rows import ALIGNED, PickedGroup, PickedRoom

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, STEP = 1003, 300
SLOTS, POSITIONS = [STEP - row for row in range(STEP)], [7 * row for row in range(STEP)]


def filled(room: PickedRoom, rows: list[int], has_masks: bool) -> PickedGroup:
    group = room.take(len(rows), has_masks)
    group.name(rows, SLOTS, POSITIONS)
    group.masks[:] = [[row * 100 + word for word in range(group.masks.shape[1])] for row in rows]
    return group


def assert_sent(group: PickedGroup, rows: list[int], has_masks: bool) -> None:
    picked, masks = group.send()
    assert picked.places.tolist() == rows
    assert picked.slots.tolist() == [SLOTS[row] for row in rows]
    assert picked.positions.tolist() == [POSITIONS[row] for row in rows]
    assert masks.tolist() == [[row * 100 + word for word in range(32 if has_masks else 0)] for row in rows]
    assert (picked.places.dtype, picked.slots.dtype, masks.dtype) == (torch.int64, torch.int32, torch.int32)
    columns = (picked.places, picked.slots, picked.positions, *([masks] if has_masks else []))
    assert all(column.data_ptr() % (4 * ALIGNED) == 0 and column.is_contiguous() for column in columns)


@pytest.mark.parametrize("sizes", [[1] * 37, [37], [3, 1, 5, 28], [2, 2, 33]])
def test_every_row_of_a_step_has_room(sizes: list[int]) -> None:
    """In groups of any size, with masks and without. All are filled in before any is sent."""
    room = PickedRoom(37, VOCAB, DEVICE)
    for _ in range(2):
        rows = random.Random(3).sample(range(STEP), 37)
        kinds = [(rows[sum(sizes[:n]) :][:size], n % 3 < 2) for n, size in enumerate(sizes)]
        groups = [filled(room, mine, has_masks) for mine, has_masks in kinds]
        for group, (mine, has_masks) in zip(groups, kinds, strict=True):
            assert_sent(group, mine, has_masks)
        room.clear()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device is late as it is")
def test_what_is_launched_behind_a_group_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose copies arrive when something waits for them. A room that is cleared before the device has read
    it is found out."""
    with late_device(monkeypatch) as device:
        room = PickedRoom(5, VOCAB, DEVICE)
        assert_sent(filled(room, [9, 4, 7], has_masks=True), [9, 4, 7], has_masks=True)
        device.current.synchronize()
        room.clear()
        assert_sent(filled(room, [5, 6], has_masks=False), [5, 6], has_masks=False)
        room.clear()
        filled(room, [8, 3], has_masks=False)
        with pytest.raises(AssertionError, match=OVERWRITTEN):
            device.current.synchronize()
