"""No function grows past one screen. Kernels may: a kernel is one function for its compiler, and its parts would have
to be inlined again. `pytest -s tests/structure/test_function_sizes.py` prints the longest."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tokenspeed", "benchmarks", "tests")
LIMIT_LINES = 60
KERNEL_DECORATORS = ("jit", "heuristics", "autotune")

EXCEPTIONS: dict[str, int] = {}
"""Functions that are longer -> their lines, docstring included. The list only gets shorter, and its numbers smaller."""
MOST_EXCEPTIONS = 0


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated by a compiler: `@triton.jit`, `@gluon.jit`, `@triton.jit(...)`."""
    found = (item.func if isinstance(item, ast.Call) else item for item in function.decorator_list)
    return any(
        (item.attr if isinstance(item, ast.Attribute) else getattr(item, "id", "")) in KERNEL_DECORATORS
        for item in found
    )


def lengths(tree: ast.AST) -> dict[str, int]:
    """Lines of each function that is no kernel, from `def` to its last line; of one name, the longest."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            assert node.end_lineno is not None
            found[node.name] = max(found.get(node.name, 0), node.end_lineno - node.lineno + 1)
    return found


def all_lengths() -> dict[str, int]:
    return {
        f"{path.relative_to(ROOT).as_posix()}:{name}": lines
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name, lines in lengths(ast.parse(path.read_text())).items()
    }


def test_no_function_is_too_long():
    found = all_lengths()
    assert len(found) > 1000, "the folders were not found"
    for lines, name in sorted(((lines, name) for name, lines in found.items()), reverse=True)[:15]:
        print(f"{lines:6}  {name}")
    too_long = {name: lines for name, lines in found.items() if lines > EXCEPTIONS.get(name, LIMIT_LINES)}
    assert not too_long, f"split these, they do two things: {too_long}"


def test_exceptions_are_still_needed():
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS, "split the function instead"
    found = all_lengths()
    kept = [name for name in EXCEPTIONS if found.get(name, 0) <= LIMIT_LINES]
    assert not kept, f"gone or short enough, take them off the list: {kept}"


def test_a_long_function_would_be_seen():
    body = "\n".join("    x = 1" for _ in range(LIMIT_LINES))
    assert lengths(ast.parse(f"class C:\n  def f(self):\n{body}")) == {"f": LIMIT_LINES + 1}
    assert lengths(ast.parse(f"async def f():\n{body}\ndef g():\n    pass")) == {"f": LIMIT_LINES + 1, "g": 2}
    for decorator in ("triton.jit", "jit", "gluon.jit(noinline=True)"):
        assert lengths(ast.parse(f"@{decorator}\ndef f():\n{body}")) == {}
