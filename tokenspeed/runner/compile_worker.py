"""A process that fills Triton's cache: `python -m tokenspeed.runner.compile_worker ORDER`, started by `compile.py`.

Which part of the work is its own stands in the environment; see `compile.my_share`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

import msgspec

from tokenspeed.config.engine import EngineConfig
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.compile import my_share

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Build the twin, run this worker's sizes and steps once, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the engine ends its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    config = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig)
    runner = build_runner(msgspec.structs.replace(config, capture_sizes=tuple(my_share(config.capture_sizes))))
    try:
        runner.capture()
    finally:
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
