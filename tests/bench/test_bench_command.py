"""`tokenspeed bench`: which benchmark is meant, and that the commands of its page are real."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.bench.arguments import parse_all
from tokenspeed.cli import bench
from tokenspeed.cli.main import main
from tokenspeed.config.flags import declared_flags
from tokenspeed.protocol.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"


class Called:
    """Stands in for a benchmark's module; remembers its arguments."""

    def __init__(self) -> None:
        self.name = ""
        self.argv: list[str] = []

    def load(self, name: str) -> Called:
        self.name = name
        return self

    def run(self, argv: list[str]) -> int:
        self.argv = argv
        return 7


@pytest.mark.parametrize(
    ("argv", "name", "rest"),
    [
        (["serve", "--port", "1"], "serve", ["--port", "1"]),
        (["--port", "1"], "serve", ["--port", "1"]),
        (["offline", "m"], "offline", ["m"]),
        (["kernels"], "kernels", []),
    ],
)
def test_the_benchmark_is_found(monkeypatch, argv, name, rest):
    called = Called()
    monkeypatch.setattr(bench.importlib, "import_module", called.load)
    assert bench.run(argv) == 7
    assert (called.name, called.argv) == (f"tokenspeed.bench.{name}", rest)


def test_without_a_name_it_helps(capsys):
    assert main(["bench"]) == 1
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, _) in bench.BENCHMARKS.items():
        assert shown.count(f"  {name}") == 2
        assert callable(importlib.import_module(module).run)


def test_an_unknown_one(capsys):
    assert main(["bench", "train"]) == 2
    assert "unknown benchmark 'train', there are: serve, offline, kernels" in capsys.readouterr().err


def test_a_missing_aiohttp_is_a_reason(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("tokenspeed.bench.serve", "tokenspeed.bench.http"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"`make install-dev` or `pip install -e '\.\[bench\]'`"):
        bench.run(["serve"])


def commands() -> list[list[str]]:
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    found = [words[2:] for words in lines if words[:2] == ["tokenspeed", "bench"]]
    return [["serve", *words] if words[0].startswith("-") else words for words in found]


def parse(name: str, argv: list[str]) -> Any:
    from tokenspeed.bench.kernels import KernelArgs
    from tokenspeed.bench.offline_args import parse_offline
    from tokenspeed.bench.serve_args import parse_serve

    if name == "kernels":
        return KernelArgs(**parse_all(declared_flags(KernelArgs), argv, "x", "x"))
    return {"serve": parse_serve, "offline": parse_offline}[name](argv)


def test_the_commands_of_the_page_are_accepted():
    pytest.importorskip("aiohttp")
    assert {words[0] for words in commands()} == set(bench.BENCHMARKS)
    for name, *argv in commands():
        parse(name, argv)
