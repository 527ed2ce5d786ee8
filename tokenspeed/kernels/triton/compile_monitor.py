"""What Triton compiles in this process: counted, watched while requests are served, shared out among workers.

A kernel variant that was not warmed up stalls every running stream for a second. TOKENSPEED_JIT_COMPILE_CHECK decides
what a launch that finds its kernel missing does after `serving`: `off` nothing, `warn` a log line, `error` an exception
(which ends the step, and with it the engine: for tests).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from tokenspeed.protocol.errors import ConfigError

VARIABLE = "TOKENSPEED_JIT_COMPILE_CHECK"
MODES = ("off", "warn", "error")

logger = logging.getLogger(__name__)


class CompiledWhileServing(RuntimeError):
    """A kernel was not ready when a request needed it."""


class CompileMonitor:
    """Triton's compilation listener. One a process; passes on to the listener that was there before.

    Args:
        mode: value of the variable.
    Raises:
        ConfigError: a mode that does not exist.
    """

    def __init__(self, mode: str = "off") -> None:
        if mode not in MODES:
            raise ConfigError(f"{VARIABLE} is {mode!r}, it must be one of: {', '.join(MODES)}")
        self._mode = mode
        self._is_serving = False
        self._before: Any = None
        self.num_compiled = 0
        self.compile_s = 0.0
        self.num_loaded = 0
        self._compiled: list[str] = []

    def install(self) -> None:
        """Listen from now on."""
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self._on_compile

    def remove(self) -> None:
        """Listen no more."""
        triton.knobs.compilation.listener = self._before

    def serving(self) -> None:
        """Everything should be ready from now on. Says what this process had to compile by itself, one by one."""
        self._is_serving = True
        if self._compiled:
            names = ", ".join(f"{name} x {count}" for name, count in Counter(self._compiled).most_common())
            logger.info("%d kernels were compiled here, in %.1f s: %s", len(self._compiled), self.compile_s, names)

    def totals(self) -> tuple[int, float]:
        """Kernels compiled by this process and the seconds that took; those loaded from the disk do not count."""
        return self.num_compiled, self.compile_s

    def _on_compile(
        self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        seconds = times.total / 1e6
        name = str(metadata.get("name") or getattr(src, "name", "a kernel"))
        if cache_hit:
            self.num_loaded += 1
        else:
            self.num_compiled += 1
            self.compile_s += seconds
            if not self._is_serving:
                self._compiled.append(name)
        if not self._is_serving or self._mode == "off":
            return
        did = "loaded from the disk" if cache_hit else f"compiled in {seconds:.2f} s"
        message = f"{name} was {did} while serving: this variant is missing from the warm-up"
        if self._mode == "error":
            raise CompiledWhileServing(message)
        logger.warning("%s", message)


def _compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run` that stops before the launch."""

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    return compiled


class CompileClaims:
    """Shares kernels out among processes that run the same launches: whoever comes first compiles. Nothing is launched:
    a kernel behind one that was passed over would take garbage for expert numbers or pages, and read anywhere. So this
    is for processes that only compile.

    Args:
        folder: exists, empty at first, common to the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Callable[..., Any] | None = None

    def install(self) -> None:
        """From now on every missing kernel is claimed first, and none runs."""
        triton.knobs.runtime.jit_cache_hook = self._is_taken
        if self._run is None:
            self._run = JITFunction.run
            JITFunction.run = _compile_only(JITFunction.run)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Compile whatever is missing again, and launch."""
        triton.knobs.runtime.jit_cache_hook = None
        if self._run is not None:
            JITFunction.run, self._run = self._run, None  # type: ignore[method-assign]

    def _is_taken(
        self,
        *,
        key: str,
        repr: str,
        fn: Any,
        compile: dict[str, Any],
        is_manual_warmup: bool,
        already_compiled: bool,
    ) -> bool:
        """Triton's hook before a compilation: True = do not compile, do not launch."""
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()
        try:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return True
        return False
