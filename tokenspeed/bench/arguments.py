"""Command lines of the benchmarks, over the same flag declarations as the server's (`config.flags`)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from tokenspeed.config.flags import Declared, build_parser
from tokenspeed.protocol.errors import ConfigError


def parse_known(
    flags: Sequence[Declared], argv: Sequence[str], prog: str, description: str
) -> tuple[dict[str, Any], list[str]]:
    """The values of fields that were given, and the words that are no flag of ours, in order.

    Raises:
        ConfigError: a value of the wrong type.
        SystemExit: after `--help`.
    """
    parser = build_parser(flags, prog)
    parser.usage, parser.description = f"{prog} [flags]", description
    values, rest = parser.parse_known_args(list(argv))
    return vars(values), rest


def parse_all(flags: Sequence[Declared], argv: Sequence[str], prog: str, description: str) -> dict[str, Any]:
    """As `parse_known`, where every word must be ours.

    Raises:
        ConfigError: an unknown flag (names the closest one), a stray word, or a bad value.
    """
    values, rest = parse_known(flags, argv, prog, description)
    if rest:
        accepted = sorted({name for item in flags for name in (*item.flag.names, *item.flag.off_names)})
        word = rest[0].split("=", 1)[0]
        close = difflib.get_close_matches(word, accepted, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else f"`{prog} --help` lists the flags"
        kind = "unknown flag" if word.startswith("-") else "unexpected word"
        raise ConfigError(f"{kind} {word}; {hint}")
    return values


def counts(text: str) -> tuple[int, ...]:
    """`1,4,16`; `none` for none of them."""
    if text == "none":
        return ()
    numbers = tuple(int(part) for part in text.split(","))
    if any(number < 1 for number in numbers):
        raise ValueError("below 1")
    return numbers


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """`1x1024,16x1024`: requests x tokens; `none` for none of them."""
    if text == "none":
        return ()
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        left, right = part.split("x")
        (number,), (length,) = counts(left), counts(right)
        pairs.append((number, length))
    return tuple(pairs)


def integer(text: str) -> int:
    """A whole number."""
    return int(text)


def number(text: str) -> float:
    """A number; `inf` is one."""
    return float(text)


# argparse names the function in "invalid ... value".
counts.__name__, shapes.__name__ = "list of counts (1,4,16)", "list of shapes (1x1024,16x1024)"
