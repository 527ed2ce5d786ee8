"""What an engine process shares with the process that started it: its order, and its fate.

The order (configuration and parent) lies in the private directory as MessagePack. An engine ignores ctrl-C and
SIGTERM while its parent lives, for both reach the whole group and the parent still needs it to drain; when the parent
is gone it exits at once. No torch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from types import FrameType

import msgspec

from tokenspeed.config.engine import EngineConfig

_ORDER_FILE = "order.msgpack"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Order(msgspec.Struct, frozen=True):
    """What an engine process is to do."""

    config: EngineConfig
    parent_pid: int
    log_level: str


def write_order(directory: str, order: Order) -> None:
    """Leave the order for the engine process, readable by this user only."""
    descriptor = os.open(os.path.join(directory, _ORDER_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.msgpack.encode(order))


def read_order(directory: str) -> Order:
    """The order left in the directory."""
    with open(os.path.join(directory, _ORDER_FILE), "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=Order)


def tie_to_parent(parent_pid: int, directory: str) -> None:
    """Exit when the parent does and remove what it left; until then ignore SIGINT and SIGTERM. Main thread only.

    Linux sends SIGTERM when the *thread* that started this process ends, so the handler asks whether the whole parent
    is gone. Elsewhere the loop's own look at `os.getppid` does the work.
    """

    def end_orphan(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_orphan)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGTERM)  # it may have died before the line above: ask the handler once


def untie() -> None:
    """The engine has ended by itself. Python gives its handlers up while it exits: a SIGTERM that was late (a thread of
    the parent has ended) would make that an exit by a signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
