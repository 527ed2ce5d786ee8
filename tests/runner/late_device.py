"""A GPU that is as late as it may be, played by the CPU: copies between page-locked memory and "the device" happen when
somebody waits for them, and not before.

    to the device      begins when the next operation on its stream needs it, or when another stream waits for an event
                       behind it; until then the target holds rubbish. The host must leave the source as it is until it
                       has waited for the copy itself, or for something behind it; that is checked then
    to the host        the values are those of its turn; the target holds rubbish until the host has waited

Every other operation is done as it is launched: a stream that is late as a whole looks the same from the others, as
long as these wait for events only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.kernels import upload
from tokenspeed.runner import cuda_runner, launched_step
from tokenspeed.sampling.logprobs import PendingLogprobs

RUBBISH = 0xB3
"""As bytes. As numbers: below 0, no index of anything, no token."""
OVERWRITTEN = "the host wrote into page-locked memory that a copy had yet to read"


class LateCopy:
    """One copy. `start`: the device makes it. `finish`: the host has waited for it. By numpy, so that a test that
    counts what torch does sees none of it."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, is_to_host: bool) -> None:
        assert target.dtype == source.dtype and target.shape == source.shape
        self._target, self._source = as_bytes(target), as_bytes(source)
        self._values = self._source.copy()
        self._is_to_host = is_to_host
        self._is_started = self._is_finished = False
        self._target.fill(RUBBISH)

    def start(self) -> None:
        if not self._is_started and not self._is_to_host:
            self._target[:] = self._source
        self._is_started = True

    def finish(self) -> None:
        if self._is_finished:
            return
        self.start()
        self._is_finished = True
        if self._is_to_host:
            self._target[:] = self._values
        else:
            assert np.array_equal(self._source, self._values), OVERWRITTEN


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The tensor's memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


class LateStream:
    """What `torch.cuda.Stream` is."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.copies: list[LateCopy] = []

    def start(self) -> None:
        """Something that is launched here needs what is before it."""
        for copy in self.copies:
            copy.start()

    def wait_event(self, event: LateEvent) -> None:
        for copy in event.copies:
            copy.start()
        self.copies += event.copies

    def synchronize(self) -> None:
        self._device.num_waits += 1
        waited, self.copies = self.copies, []
        for copy in waited:
            copy.finish()


class LateEvent:
    """What `torch.cuda.Event` is."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.copies: tuple[LateCopy, ...] = ()

    def record(self, stream: LateStream) -> None:
        self.copies = tuple(stream.copies)

    def synchronize(self) -> None:
        self._device.num_waits += 1
        for copy in self.copies:
            copy.finish()


class LateDevice(TorchDispatchMode):
    """The device, and what modules see of `torch`, which it watches while it is entered.

    Fields:
        num_waits: how often the host has waited for a stream or an event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.default = LateStream(self)
        self._streams = [self.default]
        self._pinned: dict[int, torch.Tensor] = {}

    @property
    def current(self) -> LateStream:
        return self._streams[-1]

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        self._streams.append(stream)
        try:
            yield
        finally:
            assert self._streams.pop() is stream

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked memory."""
        made = torch.empty(*shape, dtype=dtype)
        as_bytes(made).fill(RUBBISH)
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self.current
        stream.start()
        if func is torch.ops.aten.copy_.default:
            target, source, *others = args
            is_to_host, is_from_host = self._is_pinned(target), self._is_pinned(source)
            if is_to_host != is_from_host and (kwargs.get("non_blocking", False) or others == [True]):
                stream.copies.append(LateCopy(target, source, is_to_host))
                return target
        return func(*args, **kwargs)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


class LateTorch:
    """torch, whose GPU is a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.cuda = _Face(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return self._device.pinned(*shape, dtype=dtype)


class _Face:
    """`torch.cuda`, as far as runners use it."""

    def __init__(self, device: LateDevice) -> None:
        self.Stream: Callable[..., LateStream] = lambda *_: LateStream(device)
        self.Event: Callable[[], LateEvent] = lambda: LateEvent(device)
        self.stream = device.on
        self.default_stream: Callable[..., LateStream] = lambda *_: device.default
        self.current_stream: Callable[..., LateStream] = lambda *_: device.current


@contextlib.contextmanager
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """Runners, and what they upload, have such a device meanwhile."""
    device = LateDevice()
    for module in (upload, cuda_runner, launched_step):
        monkeypatch.setattr(module, "torch", LateTorch(device))
    monkeypatch.setattr(upload, "has_own_memory", lambda _: True)
    finish = PendingLogprobs.finish

    def in_its_turn(pending: PendingLogprobs) -> Any:
        device.current.synchronize()  # as reading what is on a device does
        return finish(pending)

    monkeypatch.setattr(PendingLogprobs, "finish", in_its_turn)
    with device:
        yield device
