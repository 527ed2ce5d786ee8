"""From the bytes of a request to a typed wire struct, or an `InvalidRequest` that names the field. Knows no endpoint.

Strict on purpose: JSON has no NaN, no duplicate keys and no half characters, and a field that nobody knows is more
often a misspelling than a wish to be ignored.
"""

from __future__ import annotations

import difflib
import gc
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tokenspeed.protocol.echo import cut, json_type
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body_size import check_size
from tokenspeed.server.context import off_loop
from tokenspeed.server.errors import ClientGone
from tokenspeed.server.text_work import serving

MAX_DEPTH = 64  # containers within containers

StructT = TypeVar("StructT", bound=msgspec.Struct)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequest: another content type, or not one well-formed JSON object.
        ClientGone: the client went away while sending.
    """
    kind = request.headers.get("content-type")
    if kind is not None:
        essence = kind.partition(";")[0].strip().lower()
        if essence != "application/json" and not essence.endswith("+json"):
            raise InvalidRequest(f"Content-Type is {essence[:80]!r}, it must be application/json")
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise ClientGone from error
    serving.set(request)
    return await off_loop(len(body), parse_object, body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse one JSON object, refusing what JSON forbids and what would fail deeper inside.

    Raises:
        InvalidRequest: invalid JSON or UTF-8, NaN or Infinity, a number out of range, duplicate keys, nesting deeper
            than MAX_DEPTH, a lone surrogate escape, a value that is not an object, or more than `body_size` allows.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty, it must be a JSON object")
    check_size(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        with _collector_paused():
            value = json.loads(
                text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite_float
            )
    except InvalidRequest:
        raise
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # an integer with thousands of digits
        raise InvalidRequest("the body holds an integer that is too large") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {json_type(value)}, it must be an object")
    has_escapes = "\\u" in text
    if has_escapes or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_values(value, has_escapes)
    return value


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Nothing that is parsed is garbage yet: looking for it again and again took most of a large body's time. The first
    of several threads that is done starts the collector for all; it is never left off."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def to_struct(fields: dict[str, Any], kind: type[StructT]) -> StructT:
    """Convert parsed JSON to a wire struct.

    Raises:
        InvalidRequest: naming the field, what it must be and what it was.
    """
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), fields, kind) from None


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_VALUE = re.compile(r"(?P<what>.*?) - at (?P<key>`key` in )?`(?P<path>\$.*)`$", re.DOTALL)


def _explain(text: str, fields: dict[str, Any], kind: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's message, with the value at fault and OpenAI's spelling of the path."""
    if found := _UNKNOWN.match(text):
        name = found["name"]
        where = _join(found["path"], name)
        known = kind.__struct_encode_fields__ if found["path"] in (None, "$") else ()
        close = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {close[0]!r}?" if close else "remove it, or see /openapi.json for the fields that are known"
        )
        return InvalidRequest(f"unknown field {where[:200]!r}; {hint}", param=where[:200], code="unknown_field")
    if found := _MISSING.match(text):
        where = _join(found["path"], found["name"])
        return InvalidRequest(f"the field {where!r} is required", param=where, code="missing_field")
    if found := _VALUE.match(text):
        where = _join(found["path"], None)
        what = cut(found["what"].replace("`", "").replace("Expected ", "expected ", 1), _MAX_WHAT_CHARS)
        if found["key"]:
            return InvalidRequest(f"{where}: each key must be a number in quotes, {what}", param=where)
        if where.endswith(ANY_KEY):
            where = where.removesuffix(ANY_KEY)
            return InvalidRequest(f"{where}: one of its values is wrong; {what}", param=where)
        return InvalidRequest(f"{where} is {_show(_at(fields, where))}; {what}", param=where)
    return InvalidRequest(cut(text, _MAX_WHAT_CHARS))


_MAX_WHAT_CHARS = 300  # types as msgspec writes them; of an enum it repeats the value

ANY_KEY = "[...]"
"""How msgspec writes a key of a dict."""


def _join(path: str | None, name: str | None) -> str:
    """`$.messages[0]` and `content` to `messages[0].content`."""
    base = (path or "$").removeprefix("$").removeprefix(".")
    if name is None:
        return base
    return f"{base}.{name}" if base else name


def _at(fields: Any, where: str) -> Any:
    """The value that a path points to, or the nearest one above it (msgspec writes `[...]` for any key of a dict)."""
    value = fields
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", where):
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            break
    return value


def _show(value: Any) -> str:
    """A short JSON spelling of a value for a message."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "an integer of more than 30 digits"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and len(value) > 60:
        return json.dumps(value[:57]) + "..."
    return json.dumps(value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key[:80].encode(errors="backslashreplace").decode()  # half characters are not looked for yet
                raise InvalidRequest(f"the body holds the key {shown!r} twice in one object", param=shown)
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is not JSON; numbers must be finite")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest(f"the body holds the number {text[:40]}, which is out of range")
    return value


def _check_values(value: Any, has_escapes: bool) -> None:
    """Walk containers level by level; only bodies with many brackets or with escapes come here. In Python, so that
    other threads get their turns."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        if has_escapes:
            for box in level:
                for text in [*box, *box.values()] if isinstance(box, dict) else box:
                    if isinstance(text, str) and not text.isascii():
                        _check_surrogates(text)
        level = [
            child
            for box in level
            for child in (box.values() if isinstance(box, dict) else box)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels")


def _check_surrogates(text: str) -> None:
    """Half of a surrogate pair cannot be written as UTF-8, so no tokenizer could take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the body holds the lone surrogate \\u{ord(error.object[error.start]):04x}, which is half a character"
        ) from None
