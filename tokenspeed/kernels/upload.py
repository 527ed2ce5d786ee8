"""Host memory to a device without making the host wait. Knows nothing of files or weights."""

from __future__ import annotations

from collections.abc import Callable

import torch


def staging_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the host, page-locked where `device` copies from such memory directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


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


def _nothing() -> None:
    """The copy is over."""
