"""`tokenspeed bench serve | offline | kernels`: finds the benchmark. Wiring only.

`bench serve` needs no torch, so each benchmark's module is imported only when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from tokenspeed.engine.launch import bound_spinning
from tokenspeed.protocol.errors import ConfigError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "serve": ("tokenspeed.bench.serve", "load on any OpenAI-compatible server, over HTTP"),
    "offline": ("tokenspeed.bench.offline", "decode and prefill speed of an engine in this process"),
    "kernels": ("tokenspeed.bench.kernels", "every implementation of every operation, at a model's shapes"),
}
"""Name -> (module with `run`, one line of help)."""


def run(argv: Sequence[str]) -> int:
    """Run a benchmark. Flags without a name are those of `serve`.

    Returns:
        the exit code: 1 when no benchmark was named.
    Raises:
        ConfigError: an unknown benchmark, or one that lacks an optional package.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 1
    if words[0].startswith("-"):
        words.insert(0, "serve")
    name, rest = words[0], words[1:]
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}, there are: {', '.join(BENCHMARKS)}")
    if name == "offline":
        bound_spinning()  # its module imports torch
    try:
        module = importlib.import_module(BENCHMARKS[name][0])
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(
            "`tokenspeed bench serve` needs aiohttp, which `make serve` does not install; in the checkout, run "
            "`make install-dev` or `pip install -e '.[bench]'`"
        ) from error
    return cast("Callable[[Sequence[str]], int]", module.run)(rest)


def usage() -> str:
    """Help of `tokenspeed bench`."""
    lines = [f"  {name:<9}{text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(
        [
            "usage: tokenspeed bench BENCHMARK [flags]   (flags alone: `bench serve`)",
            "",
            *lines,
            "",
            "`tokenspeed bench BENCHMARK --help` lists its flags. Each ends its output with one line of JSON.",
        ]
    )
