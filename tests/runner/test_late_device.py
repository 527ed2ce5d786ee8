"""The stand-in for a GPU is as late as it says: a test that runs on it fails for want of a wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from late_device import OVERWRITTEN, LateDevice, LateEvent, LateStream, late_device

INT32 = torch.int32


@pytest.fixture(name="device")
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    with late_device(monkeypatch) as device:
        yield device


def pinned(device: LateDevice, *values: int) -> torch.Tensor:
    made = device.pinned(len(values), dtype=INT32)
    made.numpy()[:] = values
    return made


def sent(device: LateDevice, stream: LateStream) -> tuple[torch.Tensor, torch.Tensor, LateEvent]:
    """Numbers on their way to the device, by `stream`, and an event behind them."""
    host, there, event = pinned(device, 1, 2, 3), torch.zeros(3, dtype=INT32), LateEvent(device)
    with device.on(stream):
        there.copy_(host, non_blocking=True)
        event.record(stream)
    return host, there, event


def numbers(tensor: torch.Tensor) -> Any:
    """As they are now, by no operation of torch's."""
    return tensor.numpy().tolist()


def test_what_another_stream_sends_comes_by_its_event(device: LateDevice) -> None:
    side = LateStream(device)
    _, there, event = sent(device, side)
    assert numbers(there + 0) != [1, 2, 3], "an operation elsewhere does not wait"
    device.current.wait_event(event)
    assert numbers(there + 0) == [1, 2, 3]


def test_what_the_own_stream_sends_is_there_in_order(device: LateDevice) -> None:
    _, there, _ = sent(device, device.current)
    assert numbers(there + 0) == [1, 2, 3]


@pytest.mark.parametrize("by_event", [True, False])
def test_the_host_has_what_was_there_once_it_has_waited(device: LateDevice, by_event: bool) -> None:
    host, there, event = pinned(device, 0, 0), torch.tensor([4, 5], dtype=INT32), LateEvent(device)
    host.copy_(there, non_blocking=True)
    event.record(device.current)
    there += 1
    assert numbers(host) not in ([4, 5], [5, 6], [0, 0])
    (event if by_event else device.current).synchronize()
    assert numbers(host) == [4, 5]


def test_an_event_recorded_too_early_brings_nothing(device: LateDevice) -> None:
    host, there, event = pinned(device, 0, 0), torch.tensor([4, 5], dtype=INT32), LateEvent(device)
    event.record(device.current)
    host.copy_(there, non_blocking=True)
    event.synchronize()
    assert numbers(host) != [4, 5]


@pytest.mark.parametrize("is_beside", [True, False])
def test_the_host_may_write_again_once_it_has_waited(device: LateDevice, is_beside: bool) -> None:
    """That another stream has waited is not enough: the host does not know when."""
    for waits in (True, False):
        host, there, event = sent(device, LateStream(device) if is_beside else device.current)
        device.current.wait_event(event)
        done = LateEvent(device)
        done.record(device.current)
        if waits:
            done.synchronize()
        host.numpy()[:] = 7
        assert numbers(there + 0) == [1, 2, 3]
        if waits:
            done.synchronize()
            continue
        with pytest.raises(AssertionError, match=OVERWRITTEN):
            done.synchronize()
