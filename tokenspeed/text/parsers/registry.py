"""The formats that exist, found by walking `reasoning/` and `tools/`: a file that carries `FORMAT` is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import TypeVar

import tokenspeed.text.parsers.reasoning
import tokenspeed.text.parsers.tools
from tokenspeed.text.parsers.interface import Example, ReasoningFormat, ToolFormat

_F = TypeVar("_F", ReasoningFormat, ToolFormat)


@cache
def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Every name and alias -> its format."""
    return _named(module.FORMAT for module in _modules(tokenspeed.text.parsers.reasoning))


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """Every name and alias -> its format."""
    return _named(module.FORMAT for module in _modules(tokenspeed.text.parsers.tools))


def reasoning_examples() -> dict[str, tuple[Example, ...]]:
    """A format's first name -> its samples, for the room's tests."""
    return {m.FORMAT.names[0]: m.EXAMPLES for m in _modules(tokenspeed.text.parsers.reasoning)}


def tool_examples() -> dict[str, tuple[Example, ...]]:
    """A format's first name -> its samples, for the room's tests."""
    return {m.FORMAT.names[0]: m.EXAMPLES for m in _modules(tokenspeed.text.parsers.tools)}


def _modules(package: ModuleType) -> list[ModuleType]:
    names = (module.name for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."))
    return [module for module in map(importlib.import_module, names) if hasattr(module, "FORMAT")]


def _named(formats: Iterable[_F]) -> dict[str, _F]:
    found: dict[str, _F] = {}
    for one in formats:
        for name in one.names:
            if name in found:
                raise ValueError(f"two formats have the name {name!r}: {found[name].names} and {one.names}")
            found[name] = one
    return found
