"""docs/serving/reasoning-and-tools.md names every parser."""

from __future__ import annotations

import re
from pathlib import Path

from tokenspeed.catalog.chat_templates import builtin_chat_templates
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats

PAGE = (Path(__file__).parents[2] / "docs/serving/reasoning-and-tools.md").read_text()


def first_column(heading: str) -> set[str]:
    table = PAGE[PAGE.index(f"| `{heading}` |") :].split("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_parsers_are_all_there() -> None:
    assert first_column("--reasoning-parser") == set(reasoning_formats())
    assert first_column("--tool-call-parser") == set(tool_formats())


def test_templates_are_all_there() -> None:
    assert all(f"`{name}`" in PAGE for name in builtin_chat_templates())
