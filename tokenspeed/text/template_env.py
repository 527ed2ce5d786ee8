"""The sandbox in which chat templates run: Jinja as Hugging Face sets it up, with bounds on time and size.

A template is code that came with a model, or in a request. The sandbox keeps it from Python's internals; the bounds
keep a silly or hostile one from taking the server with it. What cannot be interrupted is a loop that neither prints,
nor reads an attribute or item, nor calls anything; the sandbox bounds its length, but not that of nested ones.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenspeed.text.shield import escape_non_ascii

MAX_OUTPUT_CHARS = 64 << 20
MAX_RENDER_S = 10.0


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """One environment may render in many threads at once; each thread has its own deadline."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = TemplateNamespace
        for name in ("center", "indent", "format"):
            self.filters[name] = _bounded(self.filters[name])
        self._clock = threading.local()

    def render_bounded(self, template: Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment, checking time and size as it goes.

        Raises:
            TemplateRuntimeError: a bound was hit. Otherwise whatever the template raises.
        """
        self._clock.deadline_s = time.monotonic() + MAX_RENDER_S
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(variables):
            self._check_time()
            num_chars += len(part)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateRuntimeError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def _check_time(self) -> None:
        if time.monotonic() > getattr(self._clock, "deadline_s", float("inf")):
            raise TemplateRuntimeError(f"it took longer than {MAX_RENDER_S:g} s")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_time()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        _check_numbers(args, kwargs)  # 'x'.ljust(10**10)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's hook for `'...'.format`."""
        if isinstance(pattern := getattr(value, "__self__", None), str) and value.__name__ in ("format", "format_map"):
            _check_widths(pattern)
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses the operators by which a few characters of template make gigabytes."""
        self._check_time()
        if operator == "*" and _repeated_len(left, right) > MAX_OUTPUT_CHARS:
            raise TemplateRuntimeError(f"it repeats a value beyond {MAX_OUTPUT_CHARS} items")
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise TemplateRuntimeError("it raises a large number to a power")
        if operator == "+" and isinstance(left, str) and len(left) > MAX_OUTPUT_CHARS:
            raise TemplateRuntimeError(f"it builds a text longer than {MAX_OUTPUT_CHARS} characters")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateNamespace(Namespace):
    """A namespace without dunder attributes, through which a template could reach Python's internals."""

    def __init__(self, **attributes: Any) -> None:
        for name in attributes:
            _check_name(name)
        super().__init__(**attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: not HTML-escaped, key order kept."""
    if isinstance(value, Undefined):
        raise TemplateRuntimeError("tojson was given a value that is not defined")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return escape_non_ascii(text) if ensure_ascii else text


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter, refusing the arguments with which it would pad without end."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            _check_widths(args[0])
        _check_numbers(args[1:], kwargs)
        return function(*args, **kwargs)

    return checked


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_OUTPUT_CHARS for value in (*args, *kwargs.values())):
        raise TemplateRuntimeError(f"it passes a number above {MAX_OUTPUT_CHARS}")


def _check_widths(pattern: str) -> None:
    """Refuse a format string with a width or precision of five digits or more, or one taken from an argument."""
    if re.search(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^{}]*(:[^{}]*\d{5}|\{)", pattern):
        raise TemplateRuntimeError("it formats with a width that is too large or not known")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore, got {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _repeated_len(left: Any, right: Any) -> int:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            return len(value) * max(times, 0)
    return 0


def _is_small(value: Any) -> bool:
    return not isinstance(value, (int, float)) or abs(value) <= 1 << 16
