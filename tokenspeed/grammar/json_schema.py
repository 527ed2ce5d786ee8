"""Rewrites a user's JSON schema into one that the grammar libraries obey to the letter, or says which keyword they
would not. Runs in the server, before anything is spent on the request. No torch.

The libraries skip keywords silently (measured with xgrammar 0.2.9: `not`, `if`, `dependentRequired`, `required` names
without a property, siblings of `enum` and `$ref`, `allOf` of several, ...). The law here: whatever is generated is
valid under the schema as the user wrote it. What is generated may be less than what is valid: properties that are not
named are not made up (as in OpenAI's strict mode), a pattern matches the whole string.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import NamePattern
from tokenspeed.grammar.patterns import check_pattern
from tokenspeed.grammar.schema_disjoint import are_disjoint
from tokenspeed.grammar.schema_merge import ANNOTATIONS, Schema, merge, same_json, type_names
from tokenspeed.protocol.errors import InvalidRequest

MAX_SCHEMA_CHARS = 128 << 10
MAX_DEPTH = 48
MAX_NODES = 4000
MAX_PROPERTIES = 256  # of one object: a mask of thousands of optional ones takes seconds
MAX_ENUM = 1000
MAX_DECIMALS = 6  # of a number between bounds
MAX_NUMBER = 2**63 - 1  # in bounds and lengths: what the libraries read numbers into

FORMATS = frozenset(
    (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
        "uri-template", "uuid", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip
"""Formats that are enforced; another is an annotation, as the standard has it, and says nothing."""

UNSUPPORTED = {
    "not": "say what is allowed instead",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "contains": "describe all items",
    "minContains": "describe all items",
    "maxContains": "describe all items",
    "multipleOf": "list the values in an enum",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords that are refused wherever they stand, and what to do instead."""

_STRING = ("minLength", "maxLength", "pattern", "format")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
_OBJECT = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
FAMILIES = {"string": _STRING, "number": _NUMBER, "integer": _NUMBER, "array": _ARRAY, "object": _OBJECT}
_TYPES = frozenset(("string", "number", "integer", "array", "object", "boolean", "null"))
_COMBINERS = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_KNOWN = frozenset(("type", *_COMBINERS, *_STRING, *_NUMBER, *_ARRAY, *_OBJECT))


def rewrite_schema(schema: Any, param: str, root: str = "#") -> Schema:
    """The equivalent schema for the library.

    Args:
        param: the request's field, for errors.
        root: where the result will stand in a larger schema; its references begin there.

    Raises:
        InvalidRequest: names the place and the keyword that cannot be used, or the limit that is passed.
    """
    try:
        if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            raise GrammarError(f"the JSON schema is longer than {MAX_SCHEMA_CHARS} characters; make it smaller")
        return _Rewriter(schema, root).run()
    except GrammarError as error:
        raise InvalidRequest(str(error), param=param, code="invalid_schema") from None
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param=param, code="invalid_schema") from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        # A keyword with a value of the wrong type that no check below names.
        raise InvalidRequest(f"the JSON schema is malformed: {error}", param=param, code="invalid_schema") from None


class _Rewriter:
    """One schema. References become entries of one flat `$defs`, each rewritten once."""

    def __init__(self, schema: Any, root: str) -> None:
        self._schema = schema
        self._root = root
        self._names: dict[str, str] = {}  # pointer -> name in $defs
        self._pointers: dict[str, str] = {}  # the rewritten $ref -> pointer
        self._budget = Budget()
        self._waiting: list[str] = []
        self._num_nodes = 0

    def run(self) -> Schema:
        result = self._node(self._schema, "#", 0)
        if result is False:
            raise GrammarError("the JSON schema allows no value at all")
        definitions: Schema = {}
        while self._waiting:
            pointer = self._waiting.pop()
            node = self._node(self._resolve(pointer, pointer), pointer, 0)
            if node is False:
                raise GrammarError(f"{pointer}: it is referred to, but allows no value")
            definitions[self._names[pointer]] = node
        return {**result, "$defs": definitions} if definitions else result

    def _node(self, node: Any, where: str, depth: int) -> Any:
        """A schema object, or False for "no value"."""
        self._count_node()
        if depth > MAX_DEPTH:
            raise GrammarError(f"{where}: nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise GrammarError(f"{where}: a schema is an object or a boolean, not {type(node).__name__}")
        if _is_never(node):
            return False
        _check_keywords(node, where)
        node = {key: value for key, value in node.items() if key in _KNOWN}
        while "allOf" in node or ("$ref" in node and len(node) > 1):
            node = self._folded(node, where)
            depth += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"{where}: allOf or $ref leads back to itself")
        if "$ref" in node:
            return {"$ref": self._reference(node["$ref"], where)}
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, where, depth)
        if "enum" in node or "const" in node:
            return _values(node, where)
        return self._typed(node, where, depth)

    def _count_node(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise GrammarError(f"the JSON schema has more than {MAX_NODES} schemas inside; make it smaller")

    # ---- references and combinations ------------------------------------------------------------------------------

    def _resolve(self, pointer: Any, where: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise GrammarError(f"{where}/$ref: {pointer!r} is not inside this schema; only #/... can be followed")
        node = self._schema
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and step.isdigit() and int(step) < len(node):
                node = node[int(step)]
            elif isinstance(node, dict) and step in node:
                node = node[step]
            else:
                raise GrammarError(f"{where}/$ref: there is no {pointer} in this schema")
        return node

    def _reference(self, pointer: Any, where: str) -> str:
        target, seen = self._resolve(pointer, where), {pointer}
        while isinstance(target, dict) and "$ref" in target and not set(target) & (_KNOWN - {"$ref"}):
            pointer = target["$ref"]
            if pointer in seen:
                raise GrammarError(f"{where}/$ref: {pointer} leads only back to itself")
            seen.add(pointer)
            target = self._resolve(pointer, where)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._waiting.append(pointer)
        reference = f"{self._root}/$defs/{self._names[pointer]}"
        self._pointers[reference] = pointer
        return reference

    def _folded(self, node: Schema, where: str) -> Schema:
        """One level of allOf, and of a $ref with siblings, merged into the rest."""
        rest = {key: value for key, value in node.items() if key not in ("allOf", "$ref")}
        parts = list(node.get("allOf", []))
        if "$ref" in node:
            if not parts and not rest:
                return node
            parts.append(self._resolve(node["$ref"], where))
        for place, part in enumerate(parts):
            at = f"{where}/allOf/{place}"
            self._count_node()  # references inside references can double with every step
            if part is True:
                continue
            if not isinstance(part, dict):
                raise GrammarError(f"{at}: a schema is expected, not {part!r}")
            _check_keywords(part, at)
            self._budget.spend(len(json.dumps(part)) // 8)  # what comparing it may cost
            part = {key: value for key, value in part.items() if key in _KNOWN}
            if "$ref" in part:  # one reference inside a merge has to be opened
                target = part.pop("$ref")
                rest = merge(rest, {**part, "allOf": [self._resolve(target, at)]}, at)
            else:
                rest = merge(rest, part, at)
        return rest

    def _alternatives(self, node: Schema, where: str, depth: int) -> Any:
        key = "anyOf" if "anyOf" in node else "oneOf"
        if "anyOf" in node and "oneOf" in node:
            raise GrammarError(f"{where}: anyOf beside oneOf cannot be used; keep one of them")
        branches = node[key]
        if not isinstance(branches, list) or not branches:
            raise GrammarError(f"{where}/{key}: a list of schemas is expected")
        rest = {name: value for name, value in node.items() if name != key}
        done = []
        for place, branch in enumerate(branches):
            at = f"{where}/{key}/{place}"
            if rest and branch is not True and branch is not False:
                branch = {"allOf": [rest, branch]}
            elif rest and branch is True:
                branch = rest
            rewritten = self._node(branch, at, depth + 1)
            if rewritten is not False:
                done.append(rewritten)
        if not done:
            return False
        if key == "oneOf":
            self._check_disjoint(done, where)
        return done[0] if len(done) == 1 else {"anyOf": done}

    def _check_disjoint(self, branches: list[Schema], where: str) -> None:
        """Any match is the only match when no value can match two branches."""
        if not are_disjoint([self._opened(branch, where) for branch in branches], self._budget):
            raise GrammarError(
                f"{where}/oneOf: a value may match two of the schemas; use anyOf, or a required property with a "
                "different const in each"
            )

    def _opened(self, branch: Schema, where: str) -> Schema:
        """A rewritten branch, with its reference followed as far as types and constants go."""
        pointer = self._pointers.get(branch.get("$ref", ""))
        if pointer is None:
            return branch
        target = self._resolve(pointer, where)
        return target if isinstance(target, dict) and "allOf" not in target else {}

    # ---- one type -------------------------------------------------------------------------------------------------

    def _typed(self, node: Schema, where: str, depth: int) -> Any:
        types = _types_of(node, where)
        if types is None:
            return {}
        if len(types) > 1:
            branches = [self._one_type(name, node, where, depth) for name in types]
            branches = [branch for branch in branches if branch is not False]
            return {"anyOf": branches} if len(branches) > 1 else branches[0] if branches else False
        return self._one_type(types[0], node, where, depth)

    def _one_type(self, name: str, node: Schema, where: str, depth: int) -> Any:
        own = {key: value for key, value in node.items() if key in FAMILIES.get(name, ())}
        match name:
            case "string":
                own = _string(own, where)
            case "number" | "integer":
                own = _number(own, name, where)
            case "array":
                own = self._array(own, where, depth)
            case "object":
                own = self._object(own, where, depth)
        return {"type": name, **own}

    def _array(self, own: Schema, where: str, depth: int) -> Schema:
        if own.pop("uniqueItems", False):
            raise GrammarError(f"{where}/uniqueItems: it cannot be enforced; leave it out or set it to false")
        if own.pop("unevaluatedItems", False) is not False:
            raise GrammarError(f"{where}/unevaluatedItems: only false; use items")
        if isinstance(own.get("items"), list):  # until draft 2019-09
            own["prefixItems"] = own.pop("items")
            if "additionalItems" in own:
                own["items"] = own["additionalItems"]
        own.pop("additionalItems", None)
        if "prefixItems" in own:
            items = [
                self._node(item, f"{where}/prefixItems/{i}", depth + 1) for i, item in enumerate(own["prefixItems"])
            ]
            if False in items:
                raise GrammarError(f"{where}/prefixItems: {items.index(False)} allows no value")
            own["prefixItems"] = items
            own.setdefault("items", len(items) < own.get("minItems", 0))
            if own.get("maxItems", len(items)) < len(items):
                raise GrammarError(f"{where}/maxItems: below the number of prefixItems, all of which are generated")
        items = self._node(own.get("items", True), f"{where}/items", depth + 1)
        own["items"] = items
        if items is False and not own.get("prefixItems"):
            own.pop("prefixItems", None)
            own["items"], own["maxItems"] = {}, 0
        _check_order(own, "minItems", "maxItems", where)
        return own

    def _object(self, own: Schema, where: str, depth: int) -> Schema:
        if own.pop("unevaluatedProperties", False) is not False:
            raise GrammarError(f"{where}/unevaluatedProperties: only false; use additionalProperties")
        declared = own.get("properties", {})
        if len(declared) > MAX_PROPERTIES:
            raise GrammarError(f"{where}/properties: {len(declared)} of them, the limit is {MAX_PROPERTIES}")
        more = own.get("additionalProperties", not declared and "patternProperties" not in own)
        more = self._node(more, f"{where}/additionalProperties", depth + 1)
        patterns, matching = self._patterns(own, declared, where, depth)
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError(f"{where}/required: a list of names is expected")
        required = list(dict.fromkeys(required))
        properties: Schema = {}
        for name, schema in declared.items():
            rewritten = self._node(schema, f"{where}/properties/{name}", depth + 1)
            if rewritten is not False:
                properties[name] = rewritten
            elif name in required:
                raise GrammarError(f"{where}/required: {name} allows no value")
        for name in required:
            if name in properties:
                continue
            open_by_default = more if own.get("additionalProperties") is not None else {}
            properties[name] = matching.get(name, open_by_default)
            if properties[name] is False:
                raise GrammarError(f"{where}/required: {name} is not among the properties, and no others are allowed")
        names = own.get("propertyNames")
        if names is not None:
            if properties or patterns:
                raise GrammarError(f"{where}/propertyNames: only without properties; name them, or leave it out")
            rewritten = self._node({"type": "string", **names}, f"{where}/propertyNames", depth + 1)
            if set(rewritten) - {"type", *_STRING, "enum"}:
                raise GrammarError(f"{where}/propertyNames: only pattern, lengths and enum")
            own["propertyNames"] = rewritten
        _check_order(own, "minProperties", "maxProperties", where)
        if "patternProperties" in own or len(declared) > sum(name in properties for name in declared):
            more = False  # the libraries would let a name in whose value is limited here, or that is forbidden
        result = {**own, "additionalProperties": more}
        for key, value in (("properties", properties), ("required", required), ("patternProperties", patterns)):
            result.pop(key, None)
            if value:
                result[key] = value
        return result

    def _patterns(self, own: Schema, declared: Schema, where: str, depth: int) -> tuple[Schema, Schema]:
        """`patternProperties`, and the required names among them with what their value has to be."""
        patterns = own.get("patternProperties", {})
        if len(patterns) > 1:
            raise GrammarError(f"{where}/patternProperties: one pattern can be used, not {len(patterns)}")
        done: Schema = {}
        matching: Schema = {}
        for pattern, schema in patterns.items():
            clean = _whole(pattern)
            wanted = NamePattern(pattern, self._budget)
            both = [name for name in declared if wanted.is_in(name)]
            if both:
                raise GrammarError(f"{where}/patternProperties: {pattern!r} also matches the property {both[0]!r}")
            if own.get("additionalProperties", False) not in (False, True):
                raise GrammarError(f"{where}/patternProperties: not beside a schema in additionalProperties")
            rewritten = self._node(schema, f"{where}/patternProperties/{pattern}", depth + 1)
            if rewritten is not False:
                done[clean] = rewritten
            matching = {name: rewritten for name in own.get("required", []) if wanted.is_in(name)}
        return done, matching


# ---- rules without references ---------------------------------------------------------------------------------------


def _is_never(node: Schema) -> bool:
    """`{"not": {}}`, a common spelling of false."""
    return set(node) - ANNOTATIONS == {"not"} and node["not"] in ({}, True)


def _check_keywords(node: Schema, where: str) -> None:
    for key, instead in UNSUPPORTED.items():
        if key in node:
            raise GrammarError(f"{where}/{key}: the keyword {key} cannot be enforced; {instead}")


def _types_of(node: Schema, where: str) -> list[str] | None:
    """The types a value may have. Without `type`, that of its keywords: a part of what is valid. None: any."""
    if "type" in node:
        types = type_names(node["type"])
        unknown = [name for name in types if name not in _TYPES]
        if unknown or not types:
            raise GrammarError(
                f"{where}/type: {node['type']!r} is not a JSON type; they are {', '.join(sorted(_TYPES))}"
            )
        return list(dict.fromkeys(name for name in types if name != "integer" or "number" not in types))
    asked = [name for name in ("string", "number", "array", "object") if any(key in node for key in FAMILIES[name])]
    if len(asked) > 1:
        raise GrammarError(f"{where}: keywords of {' and '.join(asked)} without a type; add type")
    return asked or None


def _values(node: Schema, where: str) -> Any:
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list) or not values:
        raise GrammarError(f"{where}/enum: a list of values is expected")
    if len(values) > MAX_ENUM:
        raise GrammarError(f"{where}/enum: {len(values)} values, the limit is {MAX_ENUM}")
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise GrammarError(f"{where}/enum: {str(value)[:40]}... is beyond {MAX_NUMBER}; write it as a string")
    if "enum" in node and "const" in node:
        values = [value for value in values if same_json(value, node["const"])]
    others = [key for key in node if key not in ("enum", "const", "type")]
    if others:
        raise GrammarError(f"{where}/{others[0]}: not beside enum or const; list only the values that fit")
    if "type" in node:
        types = _types_of(node, where) or []
        values = [value for value in values if any(_has_type(value, name) for name in types)]
    return {"enum": values} if values else False


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and isinstance(value, int | float) and float(value).is_integer()
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
    return isinstance(value, {"string": str, "array": list, "object": dict}[name])


def _string(own: Schema, where: str) -> Schema:
    if own.get("format") not in FORMATS:
        own.pop("format", None)
    lengths = [key for key in ("minLength", "maxLength") if key in own]
    for key in ("pattern", "format"):
        if key in own and (lengths or (key == "pattern" and "format" in own)):
            other = lengths[0] if lengths else "format"
            raise GrammarError(f"{where}/{key}: not together with {other}; say it all in the pattern")
    if "pattern" in own:
        try:
            own["pattern"] = _whole(own["pattern"])
        except GrammarError as error:
            raise GrammarError(f"{where}/pattern: {error}") from None
    _check_order(own, "minLength", "maxLength", where)
    return own


def _whole(pattern: str) -> str:
    """The pattern so that every library takes it for the whole string: some look only for a part, as the standard has
    it, some ignore anchors."""
    return f"^(?:{check_pattern(pattern)})$"


def _number(own: Schema, name: str, where: str) -> Schema:
    for key, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GrammarError(f"{where}/{key}: a number is expected, not {json.dumps(value)}")
        if abs(value) > MAX_NUMBER:
            raise GrammarError(f"{where}/{key}: beyond {MAX_NUMBER}, which is the largest number that can be used")
    if name == "integer":
        for key, value in list(own.items()):
            if isinstance(value, float):
                up = key in ("minimum", "exclusiveMaximum")
                own[key] = math.ceil(value) if up else math.floor(value)
    _check_range(own, name, where)
    return own


def _check_range(own: Schema, name: str, where: str) -> None:
    """The library says of an empty range only that there is one; and where no number of its decimals fits, it takes an
    empty text for a number."""
    scale = 1 if name == "integer" else 10**MAX_DECIMALS
    lows: list[tuple[int, str]] = []
    highs: list[tuple[int, str]] = []
    for key, value in own.items():
        exact = Fraction(str(value)) * scale
        match key:
            case "minimum":
                lows.append((math.ceil(exact), key))
            case "exclusiveMinimum":
                lows.append((math.floor(exact) + 1, key))
            case "maximum":
                highs.append((math.floor(exact), key))
            case "exclusiveMaximum":
                highs.append((math.ceil(exact) - 1, key))
    if lows and highs and max(lows)[0] > min(highs)[0]:
        low, high = max(lows)[1], min(highs)[1]
        kind = name if name == "integer" else f"{name} of at most {MAX_DECIMALS} decimals"
        raise GrammarError(f"{where}: no {kind} fits {low} {own[low]} and {high} {own[high]}")


def _check_order(own: Schema, low: str, high: str, where: str) -> None:
    for key in (low, high):
        if key in own and (isinstance(own[key], bool) or not isinstance(own[key], int) or own[key] < 0):
            raise GrammarError(f"{where}/{key}: a whole number of at least 0 is expected, not {json.dumps(own[key])}")
        if own.get(key, 0) > MAX_NUMBER:
            raise GrammarError(f"{where}/{key}: beyond {MAX_NUMBER}, which is the largest number that can be used")
    if low in own and high in own and own[low] > own[high]:
        raise GrammarError(f"{where}: {low} {own[low]} is above {high} {own[high]}")
