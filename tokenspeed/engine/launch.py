"""Starts an engine, in a process of its own or on a thread, and watches it.

Owns the handle on the running engine and the wait until it is ready. Says in one line why an engine did not start.
No torch: the engine process imports it, this one does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.channel import ClientEnd, LocalClientEnd, LocalEngineEnd, local_channel
from tokenspeed.engine.ipc import IpcClientEnd
from tokenspeed.engine.lifeline import Order, write_order
from tokenspeed.engine.run import EXIT_CHECKPOINT, EXIT_CONFIG, run_engine
from tokenspeed.protocol.errors import CheckpointError, ConfigError, EngineDead
from tokenspeed.protocol.messages import Fatal, Ready, Shutdown
from tokenspeed.runner.interface import Runner

ENGINE_COMMAND = (sys.executable, "-m", "tokenspeed.engine.process")
START_TIMEOUT_S = 1800.0  # a large model over a slow disk
LAST_WORDS_S = 0.2  # what a dead process had sent may still be on its way
KILL_AFTER_S = 10.0


class EngineHandle(Protocol):
    """A started engine as its client sees it."""

    channel: ClientEnd

    @property
    def exit_code(self) -> int | None:
        """None while it lives. Set before the channel is woken, so that a sleeping receiver sees it."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, for at most `timeout_s` seconds."""
        ...

    def kill(self) -> None:
        """End it as soon as can be, without waiting. The channel stays open."""
        ...

    def stop(self, timeout_s: float = KILL_AFTER_S) -> None:
        """Tell it to shut down, wait, end it the hard way after `timeout_s` seconds, close the channel. Nobody may be
        reading the channel. A second call does nothing."""
        ...


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment, with libgomp's waiting bounded unless the user has decided it.

    After a parallel torch operation libgomp's threads spin, each on a core that the native kernels, the server or a
    neighbour want: a softmax after a decode step made the next step 3.4 -> 5.2 ms. The engine must find this set before
    torch loads.
    """
    environment = dict(environ)
    if "OMP_WAIT_POLICY" not in environ:
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    return environment


def bound_spinning() -> None:
    """The same for an engine on a thread of this process: its variables, set where torch is not loaded yet. Later
    it has no effect. Where others use the cores, the embedded model then took 6 to 10 s to load instead of 20 to 27."""
    os.environ.update(engine_environment(os.environ))


class EngineProcess:
    """An engine in a process of its own; see `EngineHandle`.

    Args:
        config: what it runs with.
        log_level: of its log, which goes to this process's stderr.
        command: starts the engine; the private directory is appended.
    """

    def __init__(self, config: EngineConfig, log_level: str = "info", command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._ipc = IpcClientEnd()
        self.channel: ClientEnd = self._ipc
        write_order(self._ipc.directory, Order(config, os.getpid(), log_level))
        self._process = subprocess.Popen(
            [*command, self._ipc.directory], stdin=subprocess.DEVNULL, env=engine_environment(os.environ)
        )
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def join(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # the caller looks at exit_code

    def kill(self) -> None:
        self._process.kill()

    def stop(self, timeout_s: float = KILL_AFTER_S) -> None:
        _say_shutdown(self.channel)
        self.join(timeout_s)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self.channel.close()

    def _watch(self) -> None:
        self._process.wait()
        self.channel.wake()


class EngineThread:
    """An engine on a thread of this process; see `EngineHandle`. A step that hangs cannot be ended the hard way."""

    def __init__(self, config: EngineConfig, build: Callable[[EngineConfig], Runner]) -> None:
        client_end, engine_end = local_channel()
        self.channel: ClientEnd = client_end
        self._exit_code: int | None = None
        self._thread = threading.Thread(
            target=self._run, args=(client_end, engine_end, config, build), name="engine", daemon=True
        )
        self._thread.start()

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def kill(self) -> None:
        _say_shutdown(self.channel)

    def stop(self, timeout_s: float = KILL_AFTER_S) -> None:
        _say_shutdown(self.channel)
        self._thread.join(timeout_s)
        self.channel.close()

    def _run(
        self,
        client_end: LocalClientEnd,
        engine_end: LocalEngineEnd,
        config: EngineConfig,
        build: Callable[[EngineConfig], Runner],
    ) -> None:
        self._exit_code = run_engine(engine_end, config, build)
        client_end.wake()


def wait_ready(engine: EngineHandle, timeout_s: float = START_TIMEOUT_S) -> Ready:
    """Block until the engine takes requests.

    Raises:
        ConfigError, CheckpointError: what the engine found wrong, in its words.
        EngineDead: it died, or is not ready after `timeout_s` seconds. Whatever is raised, it has been ended.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            exited = engine.exit_code is not None
            left_s = LAST_WORDS_S if exited else deadline_s - time.monotonic()
            if left_s <= 0:
                raise EngineDead(f"the engine is not ready after {timeout_s:.0f} s; raise the timeout, or see its log")
            for message in engine.channel.receive(left_s):
                if isinstance(message, Ready):
                    return message
                if isinstance(message, Fatal):
                    raise _start_error(engine, message.error)
            if exited:
                raise EngineDead(f"{describe_exit(engine.exit_code)} before it was ready; its log says why")
    except BaseException:
        engine.stop(0.0)
        raise


def describe_exit(exit_code: int | None) -> str:
    """How the engine ended, in words: `the engine process was ended by SIGKILL`."""
    if exit_code is not None and exit_code < 0:
        names = {known.value: known.name for known in signal.Signals}  # real-time signals have none
        return f"the engine process was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
    return f"the engine exited with code {exit_code}"


def _start_error(engine: EngineHandle, error: str) -> Exception:
    """The exception that the engine's exit code stands for."""
    engine.join(KILL_AFTER_S)
    match engine.exit_code:
        case code if code == EXIT_CONFIG:
            return ConfigError(error)
        case code if code == EXIT_CHECKPOINT:
            return CheckpointError(error)
    return EngineDead(f"the engine could not start: {error}")


def _say_shutdown(channel: ClientEnd) -> None:
    try:
        channel.send(Shutdown())
    except EngineDead:
        pass  # that is what was wanted
