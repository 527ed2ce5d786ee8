"""A process that fills Triton's cache: `python -m tokenspeed.runner.compile_worker ORDER`, started by `compile.py`.

It shares the work with its like through a folder of claims; see `kernels.triton.compile_monitor.CompileClaims`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

import msgspec

from tokenspeed.config.engine import EngineConfig
from tokenspeed.kernels.triton.compile_monitor import CompileClaims
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.compile import claims_folder

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Build the twin, run every size and step once, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the engine ends its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    config = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig)
    claims = claims_folder()
    assert claims is not None, "started by compile.py only"
    CompileClaims(claims).install()
    runner = build_runner(config)
    try:
        runner.capture()
    finally:
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
