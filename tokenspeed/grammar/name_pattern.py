"""Whether a property's name matches a pattern, in bounded time: Python's own engine backtracks, and with a user's
pattern (`^(a+)+$`) and name it would hold the server up for years. No torch.

The set of places where a match may have arrived goes through the expression from left to right, so no text is tried in
more than one way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.patterns import joined

_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>)?")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?(\\.|[^\]\\])*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Char:
    """One character."""

    accepts: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` or `$`."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Any of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; None = without end."""

    part: Node
    low: int
    high: int | None


_ESCAPED = '"\\' + "".join(map(chr, range(32)))
"""What stands in a JSON string only behind a backslash."""

Node = Char | Edge | Row | Either | Repeat
"""A part of a pattern."""


class NamePattern:
    """A pattern that `patterns.check_pattern` has let through.

    Args:
        budget: what looking for it is charged to.
    Raises:
        GrammarError: an escape or a class that is not known, a repetition of nothing.
    """

    def __init__(self, pattern: str, budget: Budget) -> None:
        self._tree = read_pattern(pattern)
        self._budget = budget

    def is_in(self, name: str) -> bool:
        """Whether some part of the name matches, as the standard has it.

        Raises:
            GrammarError: the budget is spent.
        """
        return bool(self._ends(self._tree, set(range(len(name) + 1)), name))

    def characters(self) -> Iterator[re.Pattern[str]]:
        """Every part that stands for one character: itself, an escape or a class."""
        pending: list[Node] = [self._tree]
        while pending:
            match pending.pop():
                case Char(accepts):
                    yield accepts
                case Row(nodes) | Either(nodes):
                    pending.extend(nodes)
                case Repeat(part):
                    pending.append(part)

    def escaped_part(self) -> str | None:
        """A part that libraries would follow out of a JSON string: measured with xgrammar, one that stands only for
        quotes, backslashes and control characters is written as it is, and so is a class that also holds other than
        printable ASCII. All other parts leave these characters out. None: there is none."""
        for part in dict.fromkeys(self.characters()):
            takes_escaped = any(map(part.fullmatch, _ESCAPED))
            takes_others = any(part.fullmatch(chr(code)) for code in range(32, 127) if chr(code) not in _ESCAPED)
            is_plain = part.pattern.isascii() and part.pattern.isprintable()
            if takes_escaped and not (takes_others and is_plain):
                return part.pattern
        return None

    def _ends(self, node: Node, starts: set[int], name: str) -> set[int]:
        """Where a match of `node` ends that begins at one of `starts`."""
        self._budget.spend(1 + len(starts))
        match node:
            case Char(accepts):
                return {at + 1 for at in starts if at < len(name) and accepts.fullmatch(name[at])}
            case Edge(is_start):
                return starts & {0 if is_start else len(name)}
            case Row(parts):
                for part in parts:
                    starts = self._ends(part, starts, name)
                return starts
            case Either(options):
                return set().union(*(self._ends(option, starts, name) for option in options))
            case Repeat():
                return self._repeated(node, starts, name)

    def _repeated(self, node: Repeat, starts: set[int], name: str) -> set[int]:
        for _ in range(node.low):
            following = self._ends(node.part, starts, name)
            if following == starts:  # so it stays, however often
                break
            starts = following
        found, fresh, times = set(starts), starts, node.low
        while fresh and (node.high is None or times < node.high):
            fresh = self._ends(node.part, fresh, name) - found
            found |= fresh
            times += 1
        return found


def patterns_of(schema: Any) -> Iterator[str]:
    """All regular expressions of a rewritten schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from patterns_of(item)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    yield from schema.get("patternProperties", {})
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs"):
            for each in value.values():
                yield from patterns_of(each)
        elif key not in ("enum", "const"):
            yield from patterns_of(value)


def read_pattern(pattern: str) -> Node:
    """A pattern as a tree.

    Raises:
        GrammarError: see `NamePattern`.
    """
    return _Reader(pattern).run()


class _Reader:
    """From text to tree."""

    def __init__(self, pattern: str) -> None:
        self._pattern = joined(pattern)
        self._at = 0

    def run(self) -> Node:
        return self._either()

    def _either(self) -> Node:
        options = [self._row()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            options.append(self._row())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _row(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repetition(self._item()))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _item(self) -> Node:
        char = self._pattern[self._at]
        match char:
            case "(":
                self._take(_GROUP)
                inner = self._either()
                self._at += 1
                return inner
            case "^" | "$":
                self._at += 1
                return Edge(char == "^")
            case "[":
                return self._char(self._take(_CLASS))
            case "\\":
                return self._char(self._take(_ESCAPE))
            case "*" | "+" | "?":
                raise GrammarError(f"the regular expression repeats nothing with the {char} at {self._at}")
        self._at += 1
        return self._char(r"[^\n\r]" if char == "." else re.escape(char))

    def _repetition(self, part: Node) -> Node:
        char = self._pattern[self._at : self._at + 1]
        if char and char in "*+?":
            self._at += 1
            part = Repeat(part, int(char == "+"), 1 if char == "?" else None)
        elif found := _COUNT.match(self._pattern, self._at):
            self._at = found.end()
            part = Repeat(part, int(found[1]), int(found[3]) if found[3] else None if found[2] else int(found[1]))
        else:
            return part
        if self._pattern.startswith("?", self._at):  # lazy: it finds the same
            self._at += 1
        return part

    def _take(self, kind: re.Pattern[str]) -> str:
        found = kind.match(self._pattern, self._at)
        assert found is not None, "check_pattern has seen its end"
        self._at = found.end()
        return found[0]

    def _char(self, text: str) -> Node:
        try:
            return Char(re.compile(text, re.ASCII))
        except re.error as error:
            raise GrammarError(f"the regular expression holds {text[:40]!r}, which is not supported: {error}") from None
