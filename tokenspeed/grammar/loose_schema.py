"""Schemas that need not be held exactly: of a tool without `strict`, whose call is forced. No torch.

What can be held is; the rest is left out, so that one keyword of one tool does not make the whole request unusable.
Each step lets more through than the one before it: the schema as it is, without the keywords that cannot be held, the
names of its properties with their types, any object. The last two are for what only a library refuses, too.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.json_schema import MAX_PROPERTIES, UNSUPPORTED, is_never, rewrite_schema
from tokenspeed.grammar.name_pattern import NamePattern, patterns_of
from tokenspeed.grammar.schema_merge import ANNOTATIONS, Schema
from tokenspeed.grammar.schema_strings import NARROW_STEPS, string_of
from tokenspeed.grammar.schema_types import STRING_KEYWORDS, TYPES
from tokenspeed.protocol.errors import InvalidRequest

_MAX_DEPTH = 100
_ANY: Schema = {"type": "object"}
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


NUM_STEPS = 3


def rewrite_what_can_be(schema: Schema, param: str, root: str = "#", step: int = 0) -> Schema:
    """The schema of an object for the library; see `rewrite_schema`. Its value may be less bounded than it says.

    Args:
        step: below `NUM_STEPS`; 1 = not more than names and types, 2 = any object.

    Raises:
        InvalidRequest: it is no schema.
    """
    if step:
        return _names_or_any(schema, param, root) if step == 1 else rewrite_schema(_ANY, param, root)
    try:
        exact = rewrite_schema(schema, param, root)
        if _can_all_match(exact):
            return exact
        refused = None
    except InvalidRequest as error:
        refused = error
    declared = schema.get("properties", {})
    if not isinstance(declared, dict) or not all(isinstance(each, dict | bool) for each in declared.values()):
        assert refused is not None
        raise refused
    try:
        held = rewrite_schema(_without_what_cannot_be(schema, 0, Budget()), param, root)
        if _can_all_match(held):
            return held
    except InvalidRequest:
        pass
    return _names_or_any(schema, param, root)


def _names_or_any(schema: Schema, param: str, root: str) -> Schema:
    declared = schema.get("properties")
    if declared and len(declared) <= MAX_PROPERTIES:
        required = schema.get("required")
        names = [name for name in required if name in declared] if isinstance(required, list) else []
        properties = {name: _type_only(each) for name, each in declared.items()}
        try:
            return rewrite_schema({"type": "object", "properties": properties, "required": names}, param, root)
        except InvalidRequest:
            pass
    return rewrite_schema(_ANY, param, root)


def _without_what_cannot_be(node: Any, depth: int, budget: Budget) -> Any:
    """A schema without keywords that cannot be held. All that is valid for it stays so.

    Args:
        budget: what trying to hold them is charged to; of what comes when it is spent, none is held.
    """
    if not isinstance(node, dict) or is_never(node) or depth > _MAX_DEPTH:
        return node
    reference = node.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference[:1] == "#"):
        return {}
    if "enum" in node or "const" in node:
        return {key: value for key, value in node.items() if key in ("enum", "const", "type", *ANNOTATIONS)}
    left_out = UNSUPPORTED.keys() | _cannot_be(node, budget)
    done = {key: value for key, value in node.items() if key not in left_out}
    for key, value in list(done.items()):
        if key in _LISTS and isinstance(value, list):
            done[key] = [_without_what_cannot_be(each, depth + 1, budget) for each in value]
        elif key in _ONE:
            done[key] = _without_what_cannot_be(value, depth + 1, budget)
        elif key in _NAMED and isinstance(value, dict):
            done[key] = {name: _without_what_cannot_be(each, depth + 1, budget) for name, each in value.items()}
    if "oneOf" in done:
        one_of = done.pop("oneOf")
        done.setdefault("anyOf", one_of)
    return done


def _cannot_be(node: Schema, budget: Budget) -> set[str]:
    """Keywords that cannot be held beside the others."""
    found = {"uniqueItems"}
    if "properties" in node or "patternProperties" in node:
        found.add("propertyNames")
    found |= {key for key in ("unevaluatedItems", "unevaluatedProperties") if node.get(key) is not False}
    own = {key: value for key, value in node.items() if key in STRING_KEYWORDS}
    if own and not _can_hold(own, budget):
        found |= {"pattern"} if "pattern" in own else {"format"}
        if "pattern" in own and not _can_hold({key: value for key, value in own.items() if key != "pattern"}, budget):
            found.add("format")
    return found


def _can_all_match(schema: Schema) -> bool:
    """Whether the libraries, too, take the patterns of a rewritten schema."""
    return all(map(_libraries_take, set(patterns_of(schema))))


def _can_hold(own: Schema, budget: Budget) -> bool:
    """Whether the keywords of a string, or what a schema has in their place, can be held together."""
    try:
        held = string_of(dict(own), "#", budget)
        if "pattern" in held:
            budget.spend(NARROW_STEPS * len(held["pattern"]))
        return _can_all_match(held)
    except (GrammarError, TypeError, AttributeError):
        return False


def _libraries_take(pattern: str) -> bool:
    try:
        return NamePattern(pattern, Budget()).escaped_part() is None
    except GrammarError:  # an escape or a class that is no such thing
        return False


def _type_only(schema: Schema | bool) -> Schema:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    return {"type": kind} if kinds and all(isinstance(each, str) and each in TYPES for each in kinds) else {}
