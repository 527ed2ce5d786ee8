"""How large a value a template's operation would make, told before it is made. No Jinja environment, no clock.

A few characters of template can ask for gigabytes: by repetition, by text put in place of each character of another, or
by lists that hold one another (`[a, a]`, forty times over), which are small until they are written out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

MAX_CHARS = 64 << 20
"""Of one text; also items of one list."""

MAX_NODES = 1 << 20
"""Values inside of one that is written out; about a second."""

MAX_INDENT = 64
_OTHER_CHARS = 64  # numbers, booleans and the like, written out


def too_large(num_chars: int) -> None:
    """Raise when a text of so many characters would be made."""
    if num_chars > MAX_CHARS:
        raise TemplateRuntimeError(f"it builds a text longer than {MAX_CHARS} characters")


def text_len(value: Any) -> int:
    """Characters that `str(value)` has, at least about.

    Raises:
        TemplateRuntimeError: more than `MAX_CHARS`, or `MAX_NODES` values inside.
    """
    if isinstance(value, str):
        return len(value)
    num_chars, num_nodes = 0, 0
    pending = [value]
    while pending:
        item = pending.pop()
        num_nodes += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item
        else:
            num_chars += _OTHER_CHARS
        if num_nodes + len(pending) > MAX_NODES:
            raise TemplateRuntimeError(f"it writes out more than {MAX_NODES} values")
        too_large(num_chars)
    return num_chars


def num_bytes(value: Any) -> int:
    """Memory that a text or a list takes, without what the list refers to."""
    return sys.getsizeof(value) if isinstance(value, str | list | tuple | dict | set) else 0


def check_concat(parts: Iterable[Any]) -> None:
    """Texts one behind the other."""
    too_large(sum(map(text_len, parts)))


def check_join(separator: Any, parts: list[Any]) -> None:
    """Texts with a separator between."""
    too_large(sum(map(text_len, parts)) + text_len(separator) * len(parts))


def check_replace(text: Any, old: Any, new: Any) -> None:
    """A text in place of each `old`."""
    if isinstance(text, str) and isinstance(old, str):
        too_large(len(text) + text.count(old) * text_len(new))


def check_format(pattern: str, values: Iterable[Any]) -> None:
    """Values in place of what a pattern holds, the longest in each place."""
    num_places = pattern.count("%") + pattern.count("{")
    too_large(len(pattern) + num_places * max(map(text_len, values), default=0))


def check_indent(text: Any, width: Any) -> None:
    """A margin in front of each line."""
    margin = width if isinstance(width, int) else text_len(width)
    too_large(text_len(text) + str(text).count("\n") * margin + margin)


def check_json(value: Any, indent: Any) -> None:
    """A value as JSON, maybe on lines of its own."""
    text_len(value)
    if (isinstance(indent, int) and indent > MAX_INDENT) or (isinstance(indent, str) and len(indent) > MAX_INDENT):
        raise TemplateRuntimeError(f"it indents JSON by more than {MAX_INDENT} characters")


def _wrap(text: Any, _width: Any = 79, _long: Any = True, wrapstring: Any = "\n", *_rest: Any) -> None:
    too_large((text_len(text) + 1) * (1 + text_len(wrapstring or "")))


def _replace(text: Any, old: Any = "", new: Any = "", *_rest: Any) -> None:
    check_replace(text if isinstance(text, str) else str(text), old, new)


def _indent(text: Any, width: Any = 4, *_rest: Any, **_options: Any) -> None:
    check_indent(text, width)


def _format(pattern: Any, *values: Any, **named: Any) -> None:
    check_format(str(pattern), [*values, *named.values()])


def _written(value: Any, *_rest: Any, **_options: Any) -> None:
    text_len(value)


FILTERS: Mapping[str, Callable[..., None]] = {
    "replace": _replace,
    "indent": _indent,
    "wordwrap": _wrap,
    "format": _format,
    **dict.fromkeys(("string", "pprint", "upper", "lower", "escape", "e", "trim", "title", "capitalize"), _written),
}
"""What is asked before a filter runs on the same arguments; `join` and `tojson` have checks of their own."""

METHODS: Mapping[str, Callable[..., None]] = {
    "replace": check_replace,
    "expandtabs": lambda text, tabsize=8: too_large(len(text) + text.count("\t") * tabsize),
}
"""The same for methods of a text; `join` and `format` have their own."""
