"""The process of the compile workers: `python -m tokenspeed.runner.compile_process FOLDER COUNT PARENT`, started by
`compile_start`.

Owns signals and the parent's death: an engine that is killed, or never becomes ready, cannot remove the folder. Heeds
both from its first moment, before torch and Triton are imported, and compiles nothing itself, for no signal is heard in
the compiler.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tokenspeed.runner.compile_folder import remove

NICENESS = 10
"""With as many workers as cores, the engine, which lists the kernels, would have to share one."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Compile what is ordered; returns the exit code."""
    folder, count, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _tie_to_parent(parent, folder)
    os.nice(NICENESS)
    exit_code: int = importlib.import_module("tokenspeed.runner.compile_worker").compile_all(folder, count)
    return exit_code


def _tie_to_parent(parent: int, folder: Path) -> None:
    """Remove the folder and exit when the parent is gone; the workers end with this process. Until then ignore ctrl-C
    and SIGTERM, which reach the whole group: the engine ends its workers.

    Linux sends SIGTERM when the *thread* that started this process ends.
    """

    def end_orphan(number: int = 0, frame: FrameType | None = None) -> None:
        if os.getppid() != parent:
            remove(folder)
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_orphan)
    die_with_parent(signal.SIGTERM)
    end_orphan()  # it may have died before the line above


def die_with_parent(number: int) -> None:
    """Be sent this signal then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
