"""The sandbox in which chat templates run: Jinja as Hugging Face sets it up, with bounds on time and size.

A template is code that came with a model, or in a request. The sandbox keeps it from Python's internals; the bounds
keep a silly or hostile one from taking the server with it: each text and list that an operator, a filter, a call or `~`
would make is measured before (`template_bounds`), and all that were made are counted; each turn of a loop looks at the
clock.
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
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tokenspeed.text.shield import escape_non_ascii
from tokenspeed.text.template_bounds import (
    FILTERS,
    METHODS,
    check_concat,
    check_format,
    check_join,
    check_json,
    num_bytes,
    text_len,
    too_large,
)

MAX_OUTPUT_CHARS = 64 << 20
MAX_MADE_BYTES = 1 << 30
"""All values that one rendering makes, whether or not it keeps them: what it keeps cannot be more."""

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
        del self.globals["lipsum"]  # takes the number of paragraphs, and minutes
        self.finalize = self._printed
        self._clock = threading.local()
        for name, function in list(self.filters.items()):
            self.filters[name] = self._metered(name, function)
        self.filters["_concat"] = self._concat
        self.filters["_turn"] = self._turn

    def render_bounded(self, template: Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment, checking time and size as it goes.

        Raises:
            TemplateRuntimeError: a bound was hit. Otherwise whatever the template raises.
        """
        self._clock.deadline_s = time.monotonic() + MAX_RENDER_S
        self._clock.num_bytes = 0
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
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            method = obj.__name__
            if method == "join" and len(args) == 1:
                args = (list(args[0]),)
                check_join(text, args[0])
            elif method in METHODS:
                METHODS[method](text, *args, **kwargs)
        return self._made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's hook for `'...'.format`."""
        pattern, formats = getattr(value, "__self__", None), super().wrap_str_format(value)
        if formats is None or not isinstance(pattern, str):
            return formats
        _check_widths(pattern)

        def checked(*args: Any, **kwargs: Any) -> str:
            values = args[0].values() if value.__name__ == "format_map" and args else (*args, *kwargs.values())
            check_format(pattern, values)
            return formats(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses the operators by which a few characters of template make gigabytes."""
        self._check_time()
        if operator == "*" and _repeated_len(left, right) > MAX_OUTPUT_CHARS:
            raise TemplateRuntimeError(f"it repeats a value beyond {MAX_OUTPUT_CHARS} items")
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise TemplateRuntimeError("it raises a large number to a power")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            too_large(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
            check_format(left, right if isinstance(right, tuple) else [right])
        return self._made(super().call_binop(context, operator, left, right))

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        """Jinja's hook from tree to code. What it compiles to code that no environment sees becomes a filter, which is
        seen."""
        return super()._generate(_Seen().visit(source), name, filename, defer_init)

    @pass_context  # so it is never taken for a constant
    def _turn(self, _context: Context, num_chars: int) -> None:
        """A turn of a loop that prints so many characters of the template's own, maybe into a variable."""
        self._check_time()
        self._spend(num_chars)

    def _printed(self, value: Any) -> Any:
        """What `{{ }}` prints, maybe into a variable: measured before it is written out."""
        self._check_time()
        self._spend(text_len(value))
        return value

    def _concat(self, parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ c`."""
        self._check_time()
        check_concat(parts)
        text: str = self._made("".join(map(str, parts)))
        return text

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same filter, refusing arguments by which it would make too much."""
        num_hidden = int(hasattr(function, "jinja_pass_arg"))  # a context in front of the value

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check_time()
            values = args[num_hidden:]
            if name == "join":
                values = self._join(args, values, kwargs)
                args = (*args[:num_hidden], *values)
                kwargs = {}
            elif name == "tojson":
                check_json(values[0], kwargs.get("indent", values[2] if len(values) > 2 else None))
            elif name in FILTERS:
                FILTERS[name](*values, **kwargs)
            if name in ("center", "indent", "format") and values and isinstance(values[0], str):
                _check_widths(values[0])
            _check_numbers(values[1:], kwargs)
            return self._made(function(*args, **kwargs))

        return checked

    def _join(self, args: tuple[Any, ...], values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """What `join` joins, as a list, and with what."""
        rest = {**dict(zip(("d", "attribute"), values[1:], strict=False)), **named}
        parts = list(values[0])
        if rest.get("attribute") is not None:
            parts = list(map(make_attrgetter(self, rest["attribute"]), parts))
        check_join(rest.get("d", ""), parts)
        return parts, rest.get("d", "")

    def _made(self, value: Any) -> Any:
        """Count what an operation has made."""
        self._spend(num_bytes(value))
        return value

    def _spend(self, num_bytes: int) -> None:
        spent = getattr(self._clock, "num_bytes", 0) + num_bytes
        self._clock.num_bytes = spent
        if spent > MAX_MADE_BYTES:
            raise TemplateRuntimeError(f"it builds values of more than {MAX_MADE_BYTES >> 20} MiB")


class _Seen(NodeTransformer):
    """`a ~ b` becomes `(a, b) | _concat`, and each turn of a loop begins with `n | _turn`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        num_chars = sum(len(data.data) for child in node.body for data in child.find_all(nodes.TemplateData))
        turn = nodes.Filter(nodes.Const(num_chars), "_turn", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)


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
