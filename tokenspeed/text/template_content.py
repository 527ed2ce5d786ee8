"""Which shape of content a chat template takes, one text or a list of parts, and rendering so that no text is lost.

Found in the template's syntax: one that loops over content reads parts, and one that also asks whether content is a
string takes both. Content is followed through `set`, macro arguments, `or`, `if`, and filters that keep a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jinja2 import nodes

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.text.messages import Content, in_parts, joined

Shape = Literal["text", "either", "parts"]
"""What a template takes: "text" a string only, "parts" a list only (a string would come out letter by letter, or not at
all), "either" both."""

_KEEPS_LISTS = frozenset({"default", "d", "list", "select", "reject", "selectattr", "rejectattr"})


def content_shape(template: nodes.Template) -> Shape:
    """The shape that fits a template."""
    names = _content_names(template)
    if not any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For)):
        return "text"
    # Templates also ask this of a call's arguments, or of a part.
    asks = any(test.name == "string" and _is_content(test.node, names) for test in template.find_all(nodes.Test))
    return "either" if asks else "parts"


def render_shaped(shape: Shape, chat: list[dict[str, Any]], run: Callable[[list[dict[str, Any]]], str]) -> str:
    """Messages rendered with content in the shape that the template takes, and as plain text where it would lose
    something of that (some take the first part of a system message, some add text to an assistant's content).

    Args:
        chat: content is text, or parts.
        run: renders messages.
    Raises:
        InvalidRequest: as `run` does.
    """
    plain = [_with_content(message, joined) for message in chat]
    shaped = {"text": plain, "either": chat, "parts": [_with_content(message, _parts) for message in chat]}[shape]
    if shaped == plain:
        return run(plain)
    try:
        marked = run(shaped)
    except InvalidRequest as error:
        try:
            return run(plain)
        except InvalidRequest:
            raise error from error.__cause__
    hidden = _hidden(marked, shaped)
    if not hidden:
        return marked
    mixed = [plain[index] if index in hidden else message for index, message in enumerate(shaped)]
    try:
        other = run(mixed)
    except InvalidRequest:
        return marked
    return other if len(_hidden(other, shaped)) < len(hidden) else marked


def _with_content(message: dict[str, Any], shape: Callable[[Any], Any]) -> dict[str, Any]:
    return {**message, "content": shape(message["content"])} if "content" in message else message


def _parts(content: Content) -> list[dict[str, str]]:
    return in_parts([content]) if isinstance(content, str) else content


def _hidden(rendered: str, chat: list[dict[str, Any]]) -> set[int]:
    """The messages of which some part's text is not there, or some part is there as Python or JSON writes it."""
    lists = {
        index: message["content"] for index, message in enumerate(chat) if isinstance(message.get("content"), list)
    }
    return {index for index, parts in lists.items() if not all(_is_shown(part, rendered) for part in parts)}


def _is_shown(part: dict[str, str], rendered: str) -> bool:
    written = (str(part), json.dumps(part, ensure_ascii=False))
    return part["text"].strip() in rendered and not any(each in rendered for each in written)


def _content_names(template: nodes.Template) -> frozenset[str]:
    """Variables and macro parameters that are given content somewhere."""
    given = [*_assigned(template), *_passed(template)]
    names: frozenset[str] = frozenset()
    while True:  # until nothing is found: names may be given to names
        found = names | {name for name, value in given if _is_content(value, names)}
        if found == names:
            return names
        names = found


def _assigned(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for each in template.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name):
            yield each.target.name, each.node


def _passed(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """(parameter, argument) of the calls of a template's own macros."""
    macros = {macro.name: [arg.name for arg in macro.args] for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            yield from zip(macros[call.node.name], call.args, strict=False)
            yield from ((each.key, each.value) for each in call.kwargs)


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """`x.content`, `x['content']`, `x.get('content')`, a name of one, or an expression that may give one."""
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return _is_the_word(node.arg)
        case nodes.Call():
            gets = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
            return gets and bool(node.args) and _is_the_word(node.args[0])
        case nodes.Or():
            return _is_content(node.left, names) or _is_content(node.right, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Filter():
            return node.name in _KEEPS_LISTS and _is_content(node.node, names)
        case _:
            return False


def _is_the_word(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value == "content"
