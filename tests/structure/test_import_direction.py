"""Imports go down only, torch stays where it belongs. Read from the syntax tree, so nothing has to be importable."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tokenspeed"

# Top to bottom. A room may import rooms of lower levels only, not its neighbours on the same level.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("__main__", "__init__"),
    ("cli",),
    ("server", "bench"),
    ("engine",),
    ("scheduler", "runner"),
    ("loader",),
    ("models",),
    ("layers",),
    ("attention", "moe", "quantization", "sampling", "speculative", "grammar"),
    ("kernels", "distributed"),
    ("text", "cache"),
    ("config", "catalog"),
    ("checkpoint",),
    ("protocol", "observability"),
)
RANK = {room: rank for rank, level in enumerate(LEVELS) for room in level}

# (importing file, imported module) pairs that go up on purpose: operations take the types of the rooms they serve.
ALLOWED = {("kernels/", "tokenspeed.attention.interface"), ("kernels/", "tokenspeed.moe.interface")}

# Rooms that start and test in milliseconds. In engine/, the two files that run a model themselves may have torch.
TORCH_FREE_ROOMS = ("cli", "server", "scheduler", "text", "cache", "config", "checkpoint", "protocol", "observability")
ENGINE_WITH_TORCH = {"engine/process.py", "engine/llm.py"}
CUDA_ROOMS = ("runner", "kernels", "distributed", "bench")  # a benchmark measures the device itself


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, wherever the statement stands; `from a import b` counts as `a.b` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(path: Path, tree: ast.AST) -> list[str]:
    room = room_of(path)
    found = []
    for module in imported_modules(tree):
        parts = module.split(".")
        if parts[0] != "tokenspeed" or len(parts) < 2 or parts[1] in (room, "__version__"):
            continue
        if any(name_of(path).startswith(start) and module.startswith(target) for start, target in ALLOWED):
            continue
        if parts[1] not in RANK:
            found.append(f"{name_of(path)} imports {module}, whose room has no level")
        elif RANK[parts[1]] <= RANK[room]:
            found.append(f"{name_of(path)} imports {module}, which is not below {room}/")
    return found


def test_every_room_has_a_level():
    rooms = {room_of(path) for path in sources()}
    assert rooms <= set(RANK), f"give a level to: {rooms - set(RANK)}"


def test_imports_go_down_only():
    found = [line for path in sources() for line in offences(path, ast.parse(path.read_text()))]
    assert not found, "\n".join(found)


def test_an_upward_import_would_be_seen():
    assert offences(PACKAGE / "cache/x.py", ast.parse("from tokenspeed.engine import core"))
    assert offences(PACKAGE / "runner/x.py", ast.parse("def f():\n    import tokenspeed.scheduler.scheduler"))
    assert not offences(PACKAGE / "engine/x.py", ast.parse("import tokenspeed.cache.manager"))
    assert offences(PACKAGE / "runner/x.py", ast.parse("from tokenspeed import LLM"))
    assert not offences(PACKAGE / "kernels/x.py", ast.parse("from tokenspeed.attention.interface import A"))
    assert offences(PACKAGE / "kernels/x.py", ast.parse("from tokenspeed.attention.select import A"))


def test_torch_cuda_only_in_device_rooms():
    found = []
    for path in sources():
        if room_of(path) in CUDA_ROOMS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_attribute = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
            if is_attribute and node.value.id == "torch":
                found.append(f"{name_of(path)}:{node.lineno}")
        if any(module.startswith("torch.cuda") for module in imported_modules(ast.parse(path.read_text()))):
            found.append(name_of(path))
    assert not found, f"torch.cuda outside of {CUDA_ROOMS}: {found}"


def torch_free_modules() -> dict[str, list[str]]:
    """Room -> its modules that must load without torch."""
    modules: dict[str, list[str]] = {}
    for path in sources():
        room, name = room_of(path), name_of(path)
        if room in TORCH_FREE_ROOMS or (room == "engine" and name not in ENGINE_WITH_TORCH):
            dotted = "tokenspeed." + name.removesuffix(".py").replace("/", ".")
            modules.setdefault(room, []).append(dotted.removesuffix(".__init__"))
    return modules


@pytest.mark.parametrize("room", [*TORCH_FREE_ROOMS, "engine"])
def test_room_loads_without_torch(room):
    """Imports all modules of the room in a fresh process, where only they can have brought torch in."""
    modules = torch_free_modules()[room]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
