"""The tape: a step's native calls in order, replayed by one call. The CPU's counterpart of a CUDA graph.

What is baked in: shapes and addresses. What is read at replay: everything on those addresses, so token ids, positions,
slots, lengths and page tables may change between replays, in place. While recording nothing is computed; a torch
operation that would compute is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.kernels.cpu.native.library import Library
from tokenspeed.kernels.cpu.native.memory import TapeArena
from tokenspeed.kernels.ops import GraphUnsupported

_EMPTY = frozenset({"aten::empty.memory_format", "aten::empty_strided", "aten::detach", "aten::_unsafe_view"})
"""Allowed besides views: they compute nothing."""


class Tape:
    """Satisfies `StepGraph`. Complete when the block of `NativeRecorder.record` has ended."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._calls: list[bytes] = []
        self._joined = b""
        self._inputs: dict[int, torch.Tensor] = {}
        self.arena = TapeArena()
        self.thread = threading.get_ident()

    def append(self, call: bytes, inputs: tuple[torch.Tensor | None, ...]) -> None:
        """Add a call. Inputs that are not results of this tape stay alive with it."""
        self._calls.append(call)
        for tensor in inputs:
            if tensor is not None and not self.arena.owns(tensor.data_ptr()):
                self._inputs[tensor.data_ptr()] = tensor

    def close(self) -> None:
        """No more calls."""
        self._joined = b"".join(self._calls)

    @property
    def num_calls(self) -> int:
        """Calls recorded."""
        return len(self._calls)

    def replay(self) -> None:
        """Run every call with what the recorded addresses hold now. May be called from any thread, one at a time."""
        self._library.run(self._joined, len(self._calls))


class _OnlyViews(TorchDispatchMode):
    """Refuses torch operations that compute: they would run once, now, and be missing from every replay."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not function.is_view and function.name() not in _EMPTY:
            raise GraphUnsupported(f"torch operation {function.name()} cannot be recorded, only native ones and views")
        return function(*args, **(kwargs or {}))


class NativeRecorder:
    """Satisfies `Recorder`. `begin` and `end` tell the context where the native calls of this thread go meanwhile."""

    def __init__(self, library: Library, begin: Callable[[Tape], None], end: Callable[[], None]) -> None:
        self._library = library
        self._begin = begin
        self._end = end

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """See `Recorder.record`."""
        tape = Tape(self._library)
        self._begin(tape)
        try:
            with _OnlyViews():
                yield tape
        finally:
            self._end()
        tape.close()
