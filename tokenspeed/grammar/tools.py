"""Tool calls as grammars: forced ones, a JSON array of `{"name": ..., "parameters": {...}}`, and those that a model
writes in its own format by its own decision. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tokenspeed.grammar.forms import Form, either, json_form, optional, sequence, text_form
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.loose_schema import NUM_STEPS, rewrite_what_can_be
from tokenspeed.grammar.openings import calls_or_text
from tokenspeed.grammar.tagged import tagged_arguments
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.text.parsers.interface import CallMarks, OpeningMarks

ANY_OBJECT = {"type": "object", "additionalProperties": True}


def tool_choice_schema(
    tools: Sequence[dict[str, Any]],
    choice: str | None,
    parallel: bool,
    strict: Collection[str] = (),
    starts_after: tuple[int, ...] | None = None,
) -> GrammarSpec:
    """What an answer of only calls has to obey.

    Args:
        tools: OpenAI's shape: `{"type": "function", "function": {"name", "parameters"}}`.
        choice: the name of the one tool to call (exactly once), or None = any of them ("required").
        parallel: with None: several calls are allowed.
        strict: names of the tools whose schemas are held exactly, or refused. Of the others what can be held is.
        starts_after: see `GrammarSpec`.

    Raises:
        InvalidRequest: no tool of this name, or parameters that cannot be compiled.
    """
    functions = [tool["function"] for tool in tools]
    if choice is not None:
        functions = [function for function in functions if function["name"] == choice]
    if not functions:
        known = ", ".join(repr(tool["function"]["name"]) for tool in tools) or "none"
        raise InvalidRequest(f"tool_choice names {choice!r}, which is not among tools: {known}", param="tool_choice")

    exact: dict[str, dict[str, Any]] = {}  # by root

    def text(step: int) -> str:
        def schema_of(function: dict[str, Any], root: str) -> dict[str, Any]:
            if function["name"] not in strict:
                return _parameters(function, root, partial(rewrite_what_can_be, step=step))
            if root not in exact:
                exact[root] = _parameters(function, root)
            return exact[root]

        several = choice is None and parallel
        return json.dumps(_array_of_calls(functions, schema_of, "parameters", several))

    first, *looser = dict.fromkeys(map(text, range(NUM_STEPS)))
    return GrammarSpec(kind="json_schema", text=first, looser=tuple(looser), starts_after=starts_after, param="tools")


def strict_calls(
    tools: Sequence[dict[str, Any]], strict: Collection[str], marks: CallMarks | OpeningMarks
) -> GrammarSpec:
    """Free text, in which whatever begins as a call is one: of a tool on offer, with arguments that obey its schema.

    Args:
        strict: names of the tools whose schemas count; arguments of the others are any object.
        marks: the model's format. With `OpeningMarks` the grammar is of an answer from its first character on, else of
            all that the model writes.

    Raises:
        InvalidRequest: parameters that cannot be compiled, or cannot be held in the format.
    """
    if isinstance(marks, OpeningMarks):

        def schema_of(function: dict[str, Any], root: str) -> dict[str, Any] | None:
            return _parameters(function, root) if function["name"] in strict else None

        try:
            return _structural(calls_or_text([tool["function"] for tool in tools], marks, schema_of), "tools")
        except GrammarError as error:
            raise _cannot_hold(str(error)) from None
    tags = [_tag(tool["function"], marks, tool["function"]["name"] in strict) for tool in tools]
    if marks.list_key is not None:
        tags.append(_list_tag(tools, strict, marks.trigger, marks.list_key, several=True))
    free = {"type": "triggered_tags", "triggers": [marks.trigger], "tags": tags, "excludes": list(marks.banned)}
    return _structural(free, "tools")


def answer_or_calls(
    answer: GrammarSpec, tools: Sequence[dict[str, Any]], strict: Collection[str], marks: CallMarks, parallel: bool
) -> GrammarSpec | None:
    """An output that obeys `answer`, or that is nothing but calls. None: `answer` cannot be one of two.

    Args:
        strict, marks: see `strict_calls`.
        parallel: several calls are allowed.

    Raises:
        InvalidRequest: parameters that cannot be compiled.
    """
    plain = answer_form(answer)
    if plain is None or marks.section is None:
        return None
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(tool["function"], marks, tool["function"]["name"] in strict) for tool in tools],
        "separator": marks.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if any(marks.section):
        calls = {"type": "tag", "begin": marks.section[0], "content": calls, "end": marks.section[1]}
    forms = [plain, calls]
    if marks.list_key is not None:
        forms.append(_list_tag(tools, strict, marks.trigger, marks.list_key, parallel))
    return _structural(either(forms), answer.param)


def answer_form(answer: GrammarSpec) -> Form | None:
    """A constraint as a part of a structural tag; None: it is one itself, and cannot be a part."""
    match answer.kind:
        case "json_schema":
            return json_form(json.loads(answer.text))
        case "regex":
            return {"type": "regex", "pattern": answer.text}
        case "ebnf":
            return {"type": "grammar", "grammar": answer.text}
        case "structural_tag" | "token_tag":
            return None


def arguments_form(function: dict[str, Any], is_strict: bool) -> Form:
    """The arguments of a function as a part of a structural tag: by its schema, or any object.

    Raises:
        InvalidRequest: parameters that cannot be compiled.
    """
    return json_form(_parameters(function) if is_strict else rewrite_schema(ANY_OBJECT, "tools"))


def _structural(form: Form, param: str) -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": form}), param=param)


def _tag(function: dict[str, Any], marks: CallMarks, is_strict: bool) -> Form:
    if marks.parameters is not None:
        schema = _parameters(function) if is_strict else None
        try:
            content = tagged_arguments(schema, function.get("parameters"), marks.parameters)
        except GrammarError as error:
            raise _cannot_hold(f"the parameters of the tool {function['name']!r}: {error}") from None
    else:
        content = arguments_form(function, is_strict)
    if marks.behind_number is not None:
        number = {"type": "regex", "pattern": "[0-9]{1,6}"}
        content = sequence(number, text_form(marks.behind_number), content)
    if marks.before_arguments:
        content = sequence(text_form(marks.before_arguments), content)
    if marks.own_id is not None:
        before, pattern = marks.own_id
        content = sequence(optional(sequence(text_form(before), {"type": "regex", "pattern": pattern})), content)
    return {"type": "tag", "begin": marks.begin(function["name"]), "content": content, "end": marks.end}


def _cannot_hold(said: str) -> InvalidRequest:
    return InvalidRequest(
        f"{said}. Or leave `strict` out of that tool, or force the call by tool_choice: forced calls obey any schema",
        param="tools",
        code="invalid_schema",
    )


def _list_tag(tools: Sequence[dict[str, Any]], strict: Collection[str], begin: str, key: str, several: bool) -> Form:
    """All calls as one JSON array behind `begin`; see `CallMarks.list_key`."""

    def schema_of(function: dict[str, Any], root: str) -> dict[str, Any]:
        return _parameters(function, root) if function["name"] in strict else rewrite_schema(ANY_OBJECT, "tools")

    array = _array_of_calls([tool["function"] for tool in tools], schema_of, key, several)
    content = sequence(optional(text_form(" ")), json_form(array))
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _array_of_calls(
    functions: Sequence[dict[str, Any]],
    schema_of: Callable[[dict[str, Any], str], dict[str, Any]],
    key: str,
    several: bool,
) -> dict[str, Any]:
    """The schema of an array of calls.

    Args:
        schema_of: (function, root) -> the rewritten schema of its arguments; see `rewrite_schema`.
        key: the member that holds the arguments.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for place, function in enumerate(functions):
        root = f"#/$defs/tool{place}"
        definitions[f"tool{place}"] = schema_of(function, root)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [function["name"]]}, key: {"$ref": root}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls} if len(calls) > 1 else calls[0], "minItems": 1}
    if not several:
        schema["maxItems"] = 1
    schema["$defs"] = definitions
    return schema


def _parameters(
    function: dict[str, Any],
    root: str = "#",
    rewrite: Callable[[dict[str, Any], str, str], dict[str, Any]] = rewrite_schema,
) -> dict[str, Any]:
    """The rewritten schema of a function's arguments. Each alone: references inside are read from its own root.

    Args:
        root: see `rewrite_schema`.
    """
    try:
        return rewrite(_object_only(function), "tools", root)
    except InvalidRequest as error:
        said = f"the parameters of the tool {function['name']!r}: {error.message}"
        raise InvalidRequest(said, param=error.param, code=error.code) from None


def _object_only(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object."""
    parameters: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"tools: {function['name']}: parameters.type is {kind!r}; arguments are an object, so it must be 'object'",
            param="tools",
            code="invalid_schema",
        )
    return {**parameters, "type": "object"}
