"""Frames over a Unix stream socket, one way: how the engine's news reach the client.

A step sends one frame, on the thread that launches steps. Through ZMQ that means waking a second thread, and takes
three times as long when the caches have forgotten it (75 and 23 us on a 2-core Xeon); here it is one system call. Knows
nothing of what frames mean. No torch.

    frame   [length: 4 bytes, little endian | so many bytes]
"""

from __future__ import annotations

import logging
import math
import select
import socket
import time
from collections import deque

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2**30
"""No news is so long: whoever announces more speaks another language."""
_READ_BYTES = 2**18
_HEADER_BYTES = 4


class FrameSender:
    """Never blocks before `close`, and never raises because of the reader. What the kernel does not take waits here;
    what waits is bounded by the requests admitted, and dropping is no option. One thread.

    Args:
        path: where a `FrameReceiver` listens.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._waiting: deque[bytes] = deque()
        self._is_heard = True

    @property
    def has_waiting(self) -> bool:
        """True while something waits for `flush`."""
        return bool(self._waiting)

    def send(self, frame: bytes) -> None:
        self._waiting.append(len(frame).to_bytes(_HEADER_BYTES, "little") + frame)
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes."""
        while self._waiting:
            data = self._waiting[0]
            try:
                num_sent = self._socket.send(data) if self._is_heard else len(data)
            except BlockingIOError:
                return
            except OSError:  # the reader has gone
                self._is_heard = False
                continue
            if num_sent < len(data):
                self._waiting[0] = data[num_sent:]
            else:
                self._waiting.popleft()

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most so long. A second call does nothing."""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(b"".join(self._waiting))
        except OSError:
            pass  # nobody reads any more, or too slowly, or it is closed
        self._waiting.clear()
        self._socket.close()


class FrameReceiver:
    """Listens at `path`, where it makes a socket. One thread receives; `wake` may be called by any."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._alarm, self._bell = socket.socketpair()
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        self._poll = select.poll()
        for source in (self._listener, self._alarm):
            self._poll.register(source, select.POLLIN)
        self._senders: dict[int, tuple[socket.socket, bytearray]] = {}

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """All frames at hand, oldest first. Sleeps for the first one up to `timeout_s` (None = for ever, 0 = not at
        all); empty after a timeout or a `wake`."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        frames: list[bytes] = []
        is_woken = False
        while not frames and not is_woken:
            left_s = until_s - time.monotonic()
            events = self._poll.poll(None if left_s == math.inf else max(0, math.ceil(left_s * 1000)))
            if not events:
                break
            for number, _ in events:
                if number in self._senders:
                    frames += self._read(number)
                elif number == self._listener.fileno():
                    self._accept()
                else:
                    self._alarm.recv(_READ_BYTES)
                    is_woken = True
        return frames

    def wake(self) -> None:
        """Make a `receive` that sleeps return."""
        try:
            self._bell.send(b"!")
        except BlockingIOError:
            pass  # it has been rung often enough

    def close(self) -> None:
        for sender, _ in self._senders.values():
            sender.close()
        for end in (self._listener, self._alarm, self._bell):
            end.close()

    def _accept(self) -> None:
        try:
            sender, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has left again
        sender.setblocking(False)
        self._senders[sender.fileno()] = sender, bytearray()
        self._poll.register(sender, select.POLLIN)

    def _read(self, number: int) -> list[bytes]:
        """What a sender has sent, in whole frames; a beginning is kept."""
        sender, data = self._senders[number]
        is_there = _receive_into(data, sender)
        frames, is_sane = _whole_frames(data)
        if not (is_there and is_sane):
            self._poll.unregister(sender)
            sender.close()
            del self._senders[number]
        return frames


def _receive_into(data: bytearray, sender: socket.socket) -> bool:
    """Append all that is at hand; False: nothing more will come."""
    num_bytes = _READ_BYTES
    try:
        while num_bytes == _READ_BYTES:  # a shorter piece was the last; to ask again would cost a call and an exception
            chunk = sender.recv(_READ_BYTES)
            num_bytes = len(chunk)
            data += chunk
    except BlockingIOError:
        return True
    except OSError:
        return False
    return num_bytes > 0


def _whole_frames(data: bytearray) -> tuple[list[bytes], bool]:
    """Take the whole frames off the beginning; False: what follows is none."""
    frames: list[bytes] = []
    start = 0
    while len(data) - start >= _HEADER_BYTES:
        begin = start + _HEADER_BYTES
        num_bytes = int.from_bytes(data[start:begin], "little")
        if num_bytes > MAX_FRAME_BYTES:
            logger.error("dropped a sender that announced a message of %d bytes", num_bytes)
            return frames, False
        if begin + num_bytes > len(data):
            break
        frames.append(bytes(data[begin : begin + num_bytes]))
        start = begin + num_bytes
    del data[:start]
    return frames, True
