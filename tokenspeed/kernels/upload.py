"""Host memory to a device without making the host wait. Knows nothing of files or weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def has_own_memory(device: torch.device) -> bool:
    """Whether the device does not see what the host writes, and copies from page-locked memory directly."""
    return device.type == "cuda"


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Numbers as a tensor on the device. To a GPU they travel through pinned memory, so that nobody waits for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, by way of pinned memory, so that nobody waits for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def staging_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the host, page-locked where `device` copies from such memory directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_own_memory(device))


def upload(source: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Copy a host tensor into a device tensor of the same shape, in order with the device's current stream.

    Returns:
        A function that waits until `source` may be overwritten.
    """
    out.copy_(source, non_blocking=True)
    if out.device.type != "cuda":
        return _nothing
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(out.device))
    return event.synchronize


class SideCopy:
    """Copies from page-locked memory to `device` on a stream of their own, while the current one is busy. What is
    launched on the current stream afterwards sees them.

    Fields:
        is_beside: False for a device that sees the host's memory: copies are then made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_beside = has_own_memory(device)
        if self.is_beside:
            self._stream = torch.cuda.Stream(device)
            self._arrived = torch.cuda.Event()

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """`out` must not be in use: nothing that was launched before is waited for."""
        if not self.is_beside:
            out.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
            self._arrived.record(self._stream)
        torch.cuda.current_stream(out.device).wait_event(self._arrived)


def _nothing() -> None:
    """The copy is over."""
