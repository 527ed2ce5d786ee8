"""An engine process with the fake runner: what `tokenspeed.engine.process` is, without a model. No torch."""

from __future__ import annotations

import os
import sys

from fake_runner import FakeRunner

from tokenspeed.engine.ipc import IpcEngineEnd
from tokenspeed.engine.lifeline import read_order, tie_to_parent, untie
from tokenspeed.engine.run import run_engine
from tokenspeed.protocol.errors import CheckpointError, ConfigError


def build(config):
    match config.attention_backend:
        case "config error":
            raise ConfigError("--attention-backend is 'config error'; choose another")
        case "checkpoint error":
            raise CheckpointError("model.gguf: truncated at byte 7")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "vanish":
            os._exit(9)
        case "sleep":
            import time

            time.sleep(60)
    return FakeRunner(config, step_s=0.005)


if __name__ == "__main__":
    order = read_order(sys.argv[1])
    tie_to_parent(order.parent_pid, sys.argv[1])
    assert "torch" not in sys.modules
    try:
        exit_code = run_engine(IpcEngineEnd(sys.argv[1]), order.config, build, order.parent_pid)
    finally:
        untie()
    sys.exit(exit_code)
