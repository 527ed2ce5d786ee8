"""Documentation cannot rot: links lead somewhere, commands and code in it are real."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tokenspeed.cli.main import SUBCOMMANDS
from tokenspeed.config.args import parse_args

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `room/file.py` in prose of the architecture pages.
CODE_PATH = re.compile(r"`((?:tokenspeed|tests|benchmarks|docs|[a-z]+)/[\w/.-]+\.(?:py|md|txt))`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def shell_lines(page: Path) -> list[list[str]]:
    """Commands of all shell blocks as words, comments removed."""
    lines = [line for text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_exist(page):
    targets = [target.split("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_parse(page):
    for text in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_real(page):
    """Flags of `tokenspeed serve` are accepted; subcommands, make targets and called scripts exist."""
    for words in shell_lines(page):
        command = words[0].rsplit("/", 1)[-1]
        if command in ("tokenspeed", "ts"):
            assert words[1] in SUBCOMMANDS, words
            if words[1] == "serve":
                parse_args(words[2:])
        elif command == "make":
            assert words[1] in make_targets(), words
            for word in words[2:]:
                if words[1] == "serve" and word.startswith("ARGS="):
                    parse_args(shlex.split(word.removeprefix("ARGS=")))
        elif command in ("bash", "python") and not words[1].startswith("-"):
            assert (ROOT / words[1]).exists(), words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page):
    for text in blocks(page, "python"):
        compile(text, name_of(page), "exec")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_named_in_prose_exist(page):
    named = set(CODE_PATH.findall((ROOT / page).read_text()))
    assert named, "the pattern finds nothing"
    missing = {path for path in named if not (ROOT / path).exists() and not (ROOT / "tokenspeed" / path).exists()}
    assert not missing


def test_readme_has_the_two_commands_and_the_client():
    readme = ROOT / "README.md"
    commands = [" ".join(words) for words in shell_lines(readme)]
    assert "make serve" in commands
    assert "make test" in commands
    chat = blocks(readme, "python")[0]
    assert "from openai import OpenAI" in chat
    assert len([line for line in chat.splitlines() if line]) == 4, "the README promises three lines and an import"


def test_rooms_are_all_described():
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "tokenspeed").glob("*/*.py") if path.name != "__init__.py"}
    missing = {room for room in rooms if f"`{room}`" not in text}
    assert not missing, f"describe in docs/architecture.md: {missing}"


def test_environment_variables_are_all_described():
    """Those of the benchmarks have their own page; TOKENSPEED_COMPILE_WORKER is between our own processes."""
    source = "\n".join(path.read_text() for path in (ROOT / "tokenspeed").rglob("*.py"))
    named = set(re.findall(r"TOKENSPEED_[A-Z_]*[A-Z]\b", source)) - {"TOKENSPEED_COMPILE_WORKER"}
    assert len(named) > 4, "the pattern finds nothing"
    text = (ROOT / "docs/configuration/environment.md").read_text()
    missing = {name for name in named if f"`{name}`" not in text}
    assert not missing, f"describe in docs/configuration/environment.md: {missing}"
