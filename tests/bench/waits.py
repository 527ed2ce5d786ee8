"""Who asks the device for numbers."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class WaitsForTheDevice(TorchFunctionMode):
    """Notes whether the host asks a tensor for numbers, or for a size that depends on them."""

    ASKING = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique")

    def __init__(self) -> None:
        self.waits = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits |= getattr(func, "__name__", "") in self.ASKING
        return func(*args, **(kwargs or {}))
