"""What Triton compiles in this process: counted, watched while requests are served, listed for workers.

A kernel variant that was not warmed up stalls every running stream for a second. TOKENSPEED_JIT_COMPILE_CHECK decides
what a launch that finds its kernel missing does after `serving`: `off` nothing, `warn` a log line, `error` an exception
(which ends the step, and with it the engine: for tests).
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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

    @property
    def num_met(self) -> int:
        """Variants that were compiled or loaded from the disk so far."""
        return self.num_compiled + self.num_loaded

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


@dataclass(frozen=True, slots=True)
class KernelOrder:
    """A kernel variant that somebody else may compile.

    Fields:
        module, name: where the kernel is found.
        data: Triton's own description of the variant, for `JITFunction.preload`.
        size: characters of its source with what it calls; a longer one takes longer to compile, as a rule.
    """

    module: str
    name: str
    data: str
    size: int


class KernelList:
    """Within its `with` block, launches of this thread are not made; each variant that they would need and that is
    missing here is handed on, once. Nothing is compiled: a kernel behind one that did not run would take garbage for
    expert numbers or pages, and read anywhere, so none runs at all. Other threads launch as always, but list one after
    the other: each changes Triton for the whole process and puts back what it found.

    Args:
        note: takes a variant.
    """

    _turn = threading.RLock()

    def __init__(self, note: Callable[[KernelOrder], None]) -> None:
        self._note = note
        self._thread = threading.get_ident()
        self._seen: set[tuple[str, str, str]] = set()
        self._run: Callable[..., Any] = JITFunction.run
        self._hook: Any = None

    def __enter__(self) -> KernelList:
        self._turn.acquire()
        self._run, self._hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook
        JITFunction.run = self._without_launch(JITFunction.run)  # type: ignore[method-assign]
        triton.knobs.runtime.jit_cache_hook = self._is_listed
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self._run  # type: ignore[method-assign]
        triton.knobs.runtime.jit_cache_hook = self._hook
        self._turn.release()

    def _without_launch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def listed(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_ours = threading.get_ident() == self._thread
            return run(kernel, *args, grid=grid, warmup=warmup or is_ours, **options)

        return listed

    def _is_listed(
        self,
        *,
        key: str,
        repr: str,
        fn: Any,
        compile: dict[str, Any],
        is_manual_warmup: bool,
        already_compiled: bool,
    ) -> bool:
        """Triton's hook before a compilation: True = do not compile."""
        if threading.get_ident() != self._thread:
            return False
        if (fn.module, fn.name, key) not in self._seen:
            self._seen.add((fn.module, fn.name, key))
            kernel = fn.jit_function
            self._note(KernelOrder(fn.module, fn.name, compile["specialization_data"], _source_size(kernel)))
        return True


def _source_size(kernel: Any) -> int:
    """Characters of a kernel and of all functions of ours that it calls, each once."""
    seen: dict[int, int] = {}
    left = [kernel]
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = len(function.src)
        names = function.fn.__globals__
        left += [names[name] for name in function.fn.__code__.co_names if isinstance(names.get(name), JITFunction)]
    return sum(seen.values())


def load_kernel(order: KernelOrder) -> Any:
    """The variant, compiled or from the disk; later launches of this process find it."""
    return getattr(importlib.import_module(order.module), order.name).preload(order.data)


def place_kernel(order: KernelOrder) -> None:
    """Likewise, and put it on the GPU: its first launch has nothing left to do."""
    load_kernel(order).run  # noqa: B018 - reading it does that
