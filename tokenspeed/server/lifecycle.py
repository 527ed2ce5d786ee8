"""A server's life: bind, start the engine, answer, drain, end. Knows no endpoint.

    bind the port -> engine process starts -> ready line -> SIGTERM or SIGINT -> drain -> open streams end -> exit 0
                                                         -> the engine dies   -> streams end, /health 503 -> exit 1

What may be added: another reason to stop. Not here: what a request is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import EngineClient
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.server.http_protocol import HttpProtocol

logger = logging.getLogger("tokenspeed.server")

EXIT_ENGINE_DEAD = 1
EXIT_SECOND_SIGINT = 130  # 128 + SIGINT, as shells have it
DEATH_POLL_S = 0.05
DEATH_GRACE_S = 1.0  # after the engine's death: streams get their error event, probes see 503
CLOSE_GRACE_S = 5.0  # after the drain: a slow reader gets its last event
KEEP_ALIVE_S = 75


class StopSignal:
    """SIGTERM and SIGINT as something to await. A second SIGINT ends the process at once; its engine follows it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._num_interrupts = 0

    def install(self) -> None:
        """Take the signals over. Main thread only."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.trigger, number)

    def trigger(self, number: int) -> None:
        """A signal has come."""
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                logger.warning("second SIGINT: exiting at once")
                os._exit(EXIT_SECOND_SIGINT)
        if not self._event.is_set():
            logger.info("%s: shutting down", signal.Signals(number).name)
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when the first signal has come."""
        await self._event.wait()


def run_loop(main: Awaitable[int]) -> int:
    """Run a coroutine on a new event loop, uvloop's where it is installed."""

    async def started() -> int:
        return await main

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(started())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Windows, or an installation without it
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, while the engine starts.

    Raises:
        ConfigError: the address is unknown, taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _address_error(host, port, error) from error
    return sock


async def serve(client: EngineClient, app: FastAPI, config: ServerConfig, sock: socket.socket, stop: StopSignal) -> int:
    """Answer until a signal comes or the engine dies; drain in the first case. Leaves the client open.

    Returns:
        0 after an orderly end, EXIT_ENGINE_DEAD after the engine's death.
    Raises:
        ConfigError: somebody else listens on the port.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CLOSE_GRACE_S),
        )
    )
    port = sock.getsockname()[1]
    serving = asyncio.create_task(server.serve([sock]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            await serving
            return EXIT_ENGINE_DEAD
        shown = f"[{config.host}]" if ":" in config.host else config.host
        print(f"tokenspeed ready on http://{shown}:{port}", flush=True)
        await first_of(stop.wait(), _death(client), _ended(serving))
        if client.is_alive and stop.is_set:
            await client.drain(config.drain_timeout_s)
        died = not client.is_alive
        if died:
            logger.error("the engine is dead; the server ends")
            await asyncio.sleep(DEATH_GRACE_S)
        server.should_exit = True
        await serving
        return EXIT_ENGINE_DEAD if died or not stop.is_set else 0
    except OSError as error:
        raise _address_error(config.host, port, error) from error
    finally:
        server.should_exit = True
        with contextlib.suppress(Exception):  # told above, where it mattered
            await serving


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: a signal must drain the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _death(client: EngineClient) -> None:
    while client.is_alive:
        await asyncio.sleep(DEATH_POLL_S)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when one of them does; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _address_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port or --host"
    )
