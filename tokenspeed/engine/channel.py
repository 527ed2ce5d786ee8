"""The two ends of the channel between client and engine, and the twin that stays inside one process.

Owns the face and the queue pair; `ipc.py` has the same face over a Unix socket. Knows nothing of what messages mean.
No torch.
"""

from __future__ import annotations

import queue
from typing import Generic, Protocol, TypeVar

from tokenspeed.protocol.errors import EngineDead
from tokenspeed.protocol.messages import FromEngine, ToEngine

T = TypeVar("T")


class EngineEnd(Protocol):
    """The engine's end. Used by one thread only."""

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """Every message that has arrived, oldest first. When there is none, waits up to `timeout_s` seconds for the
        first one (0 = not at all, None = for ever), asleep. The list may be empty."""
        ...

    def send(self, message: FromEngine) -> None:
        """Queue a message. Never blocks and never raises because of the other side."""
        ...

    def close(self) -> None:
        """Deliver what is queued (for at most a second), then free the end."""
        ...


class ClientEnd(Protocol):
    """The client's end. One thread receives; any thread sends."""

    def receive(self, timeout_s: float | None = None) -> list[FromEngine]:
        """Every message that has arrived, oldest first. When there is none, sleeps until there is one, for at most
        `timeout_s` seconds (None = for ever). Empty after a timeout, a `wake`, or nothing but broken messages."""
        ...

    def send(self, message: ToEngine) -> None:
        """Queue a message without blocking.

        Raises:
            EngineDead: nobody listens any more.
            OverflowError: the message holds a number that the wire cannot carry.
        """
        ...

    def wake(self) -> None:
        """Make a `receive` that sleeps on another thread return. Harmless after `close`."""
        ...

    def close(self) -> None:
        """Free the end. No `receive` may be asleep (see `wake`)."""
        ...


class _Lane(Generic[T]):
    """One direction: a queue that is emptied in one go. None on the queue only wakes the reader."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, message: T | None) -> None:
        self._queue.put(message)

    def take(self, timeout_s: float | None) -> list[T]:
        taken: list[T] = []
        try:
            message = self._queue.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                if message is not None:
                    taken.append(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            return taken


class LocalEngineEnd:
    """The engine's end inside the client's own process; see `EngineEnd`. Messages are handed over, not copied."""

    def __init__(self, inbox: _Lane[ToEngine], outbox: _Lane[FromEngine]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        return self._inbox.take(timeout_s)

    def send(self, message: FromEngine) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        pass


class LocalClientEnd:
    """The client's end inside the engine's own process; see `ClientEnd`."""

    def __init__(self, inbox: _Lane[FromEngine], outbox: _Lane[ToEngine]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    def receive(self, timeout_s: float | None = None) -> list[FromEngine]:
        return self._inbox.take(timeout_s)

    def send(self, message: ToEngine) -> None:
        if self._closed:
            raise EngineDead("the engine has been closed")
        self._outbox.put(message)

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self._closed = True


def local_channel() -> tuple[LocalClientEnd, LocalEngineEnd]:
    """A connected pair for a client and an engine that share a process."""
    to_engine: _Lane[ToEngine] = _Lane()
    from_engine: _Lane[FromEngine] = _Lane()
    return LocalClientEnd(from_engine, to_engine), LocalEngineEnd(to_engine, from_engine)
