"""The channel over ZMQ on Unix sockets in a private directory: msgspec MessagePack both ways, never pickle.

The client makes the directory (mode 0700) and binds both sockets; the engine connects. A frame that does not decode
is logged and dropped: whoever sent it, it must not end either process. No torch.

    client  PUSH --- to_engine.sock ----> PULL  engine
    client  PULL <-- from_engine.sock --- PUSH  engine
"""

from __future__ import annotations

import logging
import math
import os
import select
import shutil
import tempfile
import threading
import weakref
from typing import TypeVar

import msgspec
import zmq

from tokenspeed.protocol.errors import ConfigError, EngineDead, TokenSpeedError
from tokenspeed.protocol.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

CLOSE_LINGER_MS = 1000  # last words of a dying engine still go out
_UNIX_PATH_MAX = 107  # sun_path of Linux without its terminator
_TO_ENGINE = "to_engine.sock"
_FROM_ENGINE = "from_engine.sock"

T = TypeVar("T")


def make_private_directory() -> str:
    """A new directory that only this user can enter (mode 0700).

    Raises:
        ConfigError: its path is too long for a Unix socket.
    """
    directory = tempfile.mkdtemp(prefix="tokenspeed-")
    longest = os.path.join(directory, _FROM_ENGINE)
    if len(os.fsencode(longest)) > _UNIX_PATH_MAX:
        os.rmdir(directory)
        raise ConfigError(
            f"the socket path {longest!r} has {len(os.fsencode(longest))} bytes, a Unix socket takes {_UNIX_PATH_MAX}; "
            "set TMPDIR to a shorter folder"
        )
    return directory


class IpcClientEnd:
    """See `channel.ClientEnd`. Owns the directory and removes it, at the latest when the interpreter exits."""

    def __init__(self) -> None:
        self.directory = make_private_directory()
        self._remove = weakref.finalize(self, shutil.rmtree, self.directory, True)
        self._context = zmq.Context()
        self._outbox = _socket(self._context, zmq.PUSH)
        self._outbox.bind(_address(self.directory, _TO_ENGINE))
        self._inbox = _socket(self._context, zmq.PULL)
        self._inbox.bind(_address(self.directory, _FROM_ENGINE))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._send_lock = threading.Lock()  # a ZMQ socket may serve one thread at a time
        self._closed = False

    def receive(self, timeout_s: float | None = None) -> list[FromEngine]:
        return _drain(self._inbox, self._decoder, timeout_s)

    def send(self, message: ToEngine) -> None:
        frame = self._encoder.encode(message)
        with self._send_lock:
            if self._closed:
                raise EngineDead("the engine has been closed")
            try:
                self._outbox.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineDead("the engine process is gone") from None

    def wake(self) -> None:
        with self._send_lock:
            if self._closed:
                return
            with self._context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
                socket.connect(_address(self.directory, _FROM_ENGINE))
                socket.send(b"")

    def close(self) -> None:
        with self._send_lock:
            if self._closed:
                return
            self._closed = True
            self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()
        self._remove()


class IpcEngineEnd:
    """See `channel.EngineEnd`.

    Args:
        directory: the client's private directory.
    """

    def __init__(self, directory: str) -> None:
        self._context = zmq.Context()
        self._inbox = _socket(self._context, zmq.PULL)
        self._inbox.connect(_address(directory, _TO_ENGINE))
        self._outbox = _socket(self._context, zmq.PUSH)
        self._outbox.connect(_address(directory, _FROM_ENGINE))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        # Readable when something has happened to the inbox since it was last found empty. To ask the inbox itself at
        # every step takes seven times as long when the caches have forgotten ZMQ (90 and 14 us on a 2-core Xeon).
        self._news = select.poll()
        self._news.register(int(self._inbox.get(zmq.FD)), select.POLLIN)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        if timeout_s == 0 and not self._news.poll(0):
            return []
        return _drain(self._inbox, self._decoder, timeout_s)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close(linger=CLOSE_LINGER_MS)
        self._context.term()


def _address(directory: str, name: str) -> str:
    return f"ipc://{os.path.join(directory, name)}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that queues without limit: what waits is bounded by the requests admitted, and dropping is no option.
    The linger lets an end that nobody closed be collected, which would otherwise wait for ever for its reader."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _drain(socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None) -> list[T]:
    """All messages at hand; sleeps for the first one up to `timeout_s` (None = for ever, 0 = not at all)."""
    if timeout_s != 0:
        socket.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
    messages: list[T] = []
    while True:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        if not frame:
            continue  # a wake-up
        try:
            messages.append(decoder.decode(frame))
        except (msgspec.MsgspecError, TokenSpeedError, OverflowError, RecursionError) as error:
            logger.error("dropped a message of %d bytes that does not decode: %s", len(frame), error)
