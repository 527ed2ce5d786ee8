"""A user's structural tag, checked format by format before a library reads it. No torch.

The library takes keys that it does not know and says nothing; and what a schema or a pattern inside asks for is held
only where it has passed the checks that plain ones pass. So every type of format, with its keys, is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tokenspeed.grammar.forms import MAX_WHITESPACE, Form
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.patterns import check_pattern
from tokenspeed.grammar.sought_texts import check_sought
from tokenspeed.protocol.echo import echo, json_type

MAX_DEPTH = 48  # of formats inside formats
MAX_GRAMMAR_CHARS = 64 << 10
STYLES = ("json", "qwen_xml")
"""What JSON may be written as; of the library's others nobody has tried whether they hold a schema."""

_Holds = Literal["value", "edge", "format", "formats", "tags", "rules", "schema", "pattern", "grammar"]
_MANY: Mapping[str, _Holds] = {"at_least_one": "value", "stop_after_first": "value"}
_DISPATCH: Mapping[str, _Holds] = {"rules": "rules", "loop": "value"}
_FORMATS: Mapping[str, Mapping[str, _Holds]] = {
    "const_string": {"value": "value"},
    "json_schema": {
        "json_schema": "schema", "style": "value", "any_order": "value", "max_whitespace_cnt": "value",
        "excludes": "value",
    },
    "qwen_xml_parameter": {"json_schema": "schema"},
    "any_text": {"excludes": "value", "max_tokens": "value", "max_chars": "value"},
    "token": {"token": "value"},
    "exclude_token": {"exclude_tokens": "value"},
    "any_tokens": {"exclude_tokens": "value", "max_tokens": "value"},
    "grammar": {"grammar": "grammar", "syntax": "value"},
    "regex": {"pattern": "pattern"},
    "sequence": {"elements": "formats"},
    "or": {"elements": "formats"},
    "tag": {"begin": "edge", "content": "format", "end": "edge"},
    "triggered_tags": {"triggers": "value", "tags": "tags", "excludes": "value", **_MANY},
    "token_triggered_tags": {"trigger_tokens": "value", "tags": "tags", "exclude_tokens": "value", **_MANY},
    "tags_with_separator": {"tags": "tags", "separator": "value", **_MANY},
    "optional": {"content": "format"},
    "plus": {"content": "format"},
    "star": {"content": "format"},
    "repeat": {"min": "value", "max": "value", "content": "format"},
    "dispatch": {"excludes": "value", **_DISPATCH},
    "token_dispatch": {"exclude_tokens": "value", **_DISPATCH},
}  # fmt: skip
"""Type -> key -> what it holds. edge: text, texts or a format; value: what the library checks itself."""


def checked_tag(tag: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The tag as the library takes it: schemas rewritten, patterns checked, white space of JSON bounded.

    Args:
        tag: `{"type": "structural_tag", "format": {...}}`.
        param: the request's field, for errors.

    Raises:
        GrammarError: names the place and the type or the key that is not known, or the limit that is passed.
        InvalidRequest: a schema inside cannot be used.
    """
    _known(tag.keys(), ("type", "format"), "a structural tag")
    if "format" not in tag:
        raise GrammarError("a structural tag has a format")
    form = _format(tag["format"], "format", param, 0)
    check_sought(form)
    return {"type": "structural_tag", "format": form}


def _format(node: Any, where: str, param: str, depth: int, default: str | None = None) -> Form:
    """One format. `default`: its type where it says none."""
    if not isinstance(node, dict):
        raise GrammarError(f"{where}: a format is an object, not {json_type(node)}")
    if depth > MAX_DEPTH:
        raise GrammarError(f"{where[:100]}...: formats are nested more than {MAX_DEPTH} deep; flatten it")
    kind = node.get("type", default)
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise GrammarError(f"{where}/type: {echo(kind)} is no type of a format; there are {', '.join(_FORMATS)}")
    keys = _FORMATS[kind]
    _known(node.keys(), ("type", *keys), f"{where}: a format of type {kind}")
    done = {key: _part(node[key], keys[key], f"{where}/{key}", param, depth + 1) for key in keys if key in node}
    excluded = done.get("excludes", [])
    if not isinstance(excluded, list) or not all(isinstance(text, str) and text for text in excluded):
        raise GrammarError(f"{where}/excludes: a list of texts is expected, none of them empty")
    if kind in ("json_schema", "qwen_xml_parameter"):
        return _json(done, kind, where)
    return {"type": kind, **done}


def _part(value: Any, holds: _Holds, where: str, param: str, depth: int) -> Any:
    match holds:
        case "format":
            return _format(value, where, param, depth)
        case "formats" | "tags" | "rules":
            if not isinstance(value, list):
                raise GrammarError(f"{where}: a list is expected, not {json_type(value)}")
            return [_member(each, holds, f"{where}/{place}", param, depth) for place, each in enumerate(value)]
        case "edge":
            return _format(value, where, param, depth) if isinstance(value, dict) else value
        case "schema":
            return rewrite_schema(value, param)
        case "pattern":
            if not isinstance(value, str):
                raise GrammarError(f"{where}: a regular expression is a string")
            return check_pattern(value)
        case "grammar":
            if not isinstance(value, str) or len(value) > MAX_GRAMMAR_CHARS:
                raise GrammarError(f"{where}: a grammar is a string of at most {MAX_GRAMMAR_CHARS} characters")
    return value


def _member(each: Any, holds: _Holds, where: str, param: str, depth: int) -> Any:
    if holds != "rules":
        return _format(each, where, param, depth, "tag" if holds == "tags" else None)
    if not isinstance(each, list) or len(each) != 2:
        raise GrammarError(f"{where}: a rule is a list of a text or token and a format")
    if each[0] == "":
        raise GrammarError(f"{where}/0: the text that a rule is for is not empty")
    return [each[0], _format(each[1], f"{where}/1", param, depth)]


def _json(node: Form, kind: str, where: str) -> Form:
    """JSON by a schema. Without a bound small models write white space until max_tokens."""
    if "json_schema" not in node:
        raise GrammarError(f"{where}: json_schema is missing")
    style = node.get("style", "json") if kind == "json_schema" else "qwen_xml"
    if style not in STYLES:
        raise GrammarError(f"{where}/style: {echo(style)} cannot be used; there are {', '.join(STYLES)}")
    if node.pop("any_order", False) is not False:
        raise GrammarError(f"{where}/any_order: only false; required properties would not be held")
    if node.get("excludes") and style != "json":
        raise GrammarError(f"{where}/excludes: only with the style json; lengths of strings would not be held")
    most = node.get("max_whitespace_cnt")
    if most is None:
        most = MAX_WHITESPACE
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise GrammarError(f"{where}/max_whitespace_cnt: a whole number of at least 0 is expected")
    return {"type": "json_schema", **node, "style": style, "max_whitespace_cnt": min(most, MAX_WHITESPACE)}


def _known(keys: Any, known: tuple[str, ...], what: str) -> None:
    for key in keys:
        if key not in known:
            raise GrammarError(f"{what} has no key {echo(key)}; it has {', '.join(known)}")
