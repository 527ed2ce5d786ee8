"""The engine process: `python -m tokenspeed.engine.process DIRECTORY`, started by `launch.py` and by nobody else.

Owns what belongs to the process: signals, its parent's death, the exit code. With `llm.py` the only file of this room
that imports torch, through `runner.build`, and not before the processes are started that compile a GPU's kernels: they
import it too, which takes 3 to 6 s, and so do both at once.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.ipc import IpcEngineEnd
from tokenspeed.engine.lifeline import read_order, tie_to_parent, untie
from tokenspeed.engine.run import run_engine
from tokenspeed.observability.logs import configure_logging
from tokenspeed.runner.compile_start import start_early
from tokenspeed.runner.interface import Runner


def main(watched: Callable[[Runner], Runner] | None = None) -> int:
    """Run the engine whose order lies in the directory named by the first argument; returns the exit code.

    Args:
        watched: puts something between loop and runner, for benchmarks.
    """
    directory = sys.argv[1]
    order = read_order(directory)
    tie_to_parent(order.parent_pid, directory)
    configure_logging(order.log_level, "engine")
    try:
        build = _build if watched is None else lambda config: watched(_build(config))
        return run_engine(IpcEngineEnd(directory), order.config, build, order.parent_pid)
    finally:
        untie()
        gc.unfreeze()  # Triton's bindings count what is left at the exit, and complain


def _build(config: EngineConfig) -> Runner:
    """The runner. What exists by then stays: the collector need not walk through torch's modules again, which stops
    every request for 0.2 s (230,000 objects, 2-core Xeon)."""
    workers = start_early(config)
    try:
        build_runner = importlib.import_module("tokenspeed.runner.build").build_runner
        runner: Runner = build_runner(config, workers)
    finally:
        if workers is not None:
            workers.stop()
    gc.freeze()
    return runner


if __name__ == "__main__":
    sys.exit(main())
