"""Launches that remember what Triton found out: a step makes hundreds, and the host must stay ahead of the GPU.

`kernel[grid](...)` binds its arguments by name, derives each one's kind, prints all compile-time values into a cache
key and asks the driver about every pointer, at each launch. Here what was compiled is found by the arguments' kinds and
the compile-time values themselves, in less than half of the time.

Whatever is unusual goes Triton's own way: the first launch of a variant, other arguments than tensors on a GPU, 32-bit
numbers, floats and None, hooks, debugging, the interpreter, another `JITFunction.run` (`compile_monitor.KernelList`
puts one there), and versions of Triton whose launches were not compared (`launch_notes` tells a start's log). One thing
is not looked for: that a global value a kernel was compiled with has changed since; kernels read constants only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

COMPARED = ("3.6.0",)
"""Versions of Triton whose `JITFunction.run` and launcher this module follows, tested on a GPU."""
_RUN = JITFunction.run if JITFunction.run.__module__ == JITFunction.__module__ else None
"""Triton's own; None if somebody else's is there already."""
_INT32 = 2**31


def ceil_div(a: int, b: int) -> int:
    """Programs that b items each take for a items. `triton.cdiv` is a compile-time function, 5 us from the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The next one, n itself if it is one; n >= 1. Likewise."""
    return 1 << (n - 1).bit_length()


def why_not_quick() -> str | None:
    """None where launches are quick here, otherwise the reason."""
    version = triton.__version__.split("+")[0]
    if torch.version.hip is not None:
        return "quick launches are for NVIDIA GPUs"
    if version not in COMPARED:
        return f"quick launches know {', '.join(COMPARED)}, this is {version}"
    return "Triton's own launch was replaced" if _RUN is None else None


def launch_notes() -> list[str]:
    """For the log of a start, where steps that no graph holds take the host longer than they could."""
    reason = why_not_quick()
    return [] if reason is None else [f"launches: by Triton ({reason})"]


class QuickLaunch:
    """Launches a kernel: `quick[grid](*arguments, **compile_time_values_and_options)`, as the kernel itself would.

    Arguments go by place, compile-time values by name; with others it stays correct, but is not quick.

    Args:
        kernel: of `triton.jit`, or its interpreter's.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._is_compiled = why_not_quick() is None and isinstance(kernel, JITFunction)
        self._params = kernel.params if self._is_compiled else []
        self._specialized = [not param.do_not_specialize for param in self._params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kernel = self._kernel
        is_usual = self._is_compiled and type(kernel).run is _RUN and type(grid) is tuple
        if not is_usual or kernel.pre_run_hooks or _is_watched():
            return kernel[grid](*args, **options)
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        kinds: list[Any] = [device]
        values: list[Any] = []
        for arg, is_specialized in zip(args, self._specialized, strict=False):
            kind = type(arg)
            if isinstance(arg, torch.Tensor) and arg.is_cuda:
                value = arg.data_ptr()
                kinds += (arg.dtype, value & 15 == 0)
                values.append(value)
                continue
            if kind is int and -_INT32 <= arg < _INT32:
                kinds += (arg == 1, arg & 15 == 0) if is_specialized else (kind,)
            elif kind is float or arg is None:
                kinds.append(kind)
            else:
                return kernel[grid](*args, **options)
            values.append(arg)
        # Types as well: 1, True and 1.0 are equal, and not the same to a kernel.
        key = (*kinds, *options.items(), *map(type, options.values()))
        try:
            found = self._known.get(key)
        except TypeError:  # an option without a hash
            return kernel[grid](*args, **options)
        if found is None:
            return self._first(key, grid, args, options)
        compiled, run, function, metadata, constants = found
        y, z = (*grid[1:], 1, 1)[:2]
        stream = driver.get_current_stream(device)
        run(grid[0], y, z, stream, function, metadata, None, None, None, *values, *constants)
        return compiled

    def _first(
        self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Triton's own launch; remembers what it used where the same can be done without it."""
        compiled = self._kernel[grid](*args, **options)
        given, rest = self._params[: len(args)], self._params[len(args) :]
        is_split = not any(param.is_constexpr for param in given) and all(param.is_constexpr for param in rest)
        if compiled is not None and is_split and all(p.name in options for p in rest):
            constants = tuple(options[param.name] for param in rest)
            self._known[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata, constants)
        return compiled


def _is_watched() -> bool:
    """Somebody wants to see each launch, or asked for checks."""
    runtime = triton.knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hooks is not None and getattr(hooks, "calls", True):
            return True
    return bool(runtime.debug)
