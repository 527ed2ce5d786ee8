"""Rewrites a user's JSON schema into one that the grammar libraries obey to the letter, or says which keyword they
would not. Runs in the server, before anything is spent on the request. No torch.

The libraries skip keywords silently (measured with xgrammar 0.2.9: `not`, `if`, `dependentRequired`, `required` names
without a property, siblings of `enum` and `$ref`, `allOf` of several, ...). The law here: whatever is generated is
valid under the schema as the user wrote it. What is generated may be less than what is valid: properties that are not
named are not made up (as in OpenAI's strict mode), a pattern matches the whole string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import NamePattern
from tokenspeed.grammar.schema_disjoint import are_disjoint, telling_names
from tokenspeed.grammar.schema_merge import ANNOTATIONS, EmptySchema, Schema, merge
from tokenspeed.grammar.schema_pointers import Pointer, Pointers, place_of
from tokenspeed.grammar.schema_shapes import malformed
from tokenspeed.grammar.schema_size import SchemaSize
from tokenspeed.grammar.schema_strings import string_of, whole
from tokenspeed.grammar.schema_types import (
    ARRAY_KEYWORDS,
    FAMILIES,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
    check_count,
    check_order,
    number_of,
    types_of,
)
from tokenspeed.grammar.schema_values import unique_arrays, values_of
from tokenspeed.protocol.echo import json_type
from tokenspeed.protocol.errors import InvalidRequest

MAX_SCHEMA_CHARS = 128 << 10
MAX_WRITTEN_CHARS = 2 * MAX_SCHEMA_CHARS  # of what it becomes: types and closed objects are spelled out
MAX_DEPTH = 48
MAX_NODES = 4000
MAX_PROPERTIES = 256  # of one object: a mask of thousands of optional ones takes seconds

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

_GROWN = (
    f"the JSON schema becomes longer than {MAX_WRITTEN_CHARS} characters where references, anyOf beside keywords, "
    "uniqueItems, formats and required names without a property are written out; make it smaller"
)
_COMBINERS = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_KNOWN = frozenset(("type", *_COMBINERS, *STRING_KEYWORDS, *NUMBER_KEYWORDS, *ARRAY_KEYWORDS, *OBJECT_KEYWORDS))


def rewrite_schema(schema: Any, param: str, root: str = "#") -> Schema:
    """The equivalent schema for the library.

    Args:
        param: the request's field, for errors.
        root: where the result will stand in a larger schema; its references begin there.

    Raises:
        InvalidRequest: names the place and the keyword that cannot be used, or the limit that is passed.
    """
    try:
        too_long = f"the JSON schema is longer than {MAX_SCHEMA_CHARS} characters; make it smaller"
        SchemaSize(MAX_SCHEMA_CHARS, too_long).of(schema)
        return _Rewriter(schema, root).run()
    except GrammarError as error:
        raise InvalidRequest(str(error), param=param, code="invalid_schema") from None
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param=param, code="invalid_schema") from None
    except (TypeError, ValueError, AttributeError, KeyError):
        # A keyword with a value of the wrong type that no check below names.
        why = malformed(schema) or "a keyword has a value that it cannot have"
        raise InvalidRequest(f"the JSON schema is malformed: {why}", param=param, code="invalid_schema") from None


class _Rewriter:
    """One schema. References become entries of one flat `$defs`, each rewritten once."""

    def __init__(self, schema: Any, root: str) -> None:
        self._schema = schema
        self._user = Pointers(schema)
        self._root = root
        self._names: dict[Pointer, str] = {}  # pointer -> name in $defs
        self._pointers: dict[str, Pointer] = {}  # the rewritten $ref -> pointer
        self._budget = Budget()
        self._targets: dict[Pointer, Schema | EmptySchema] = {}  # pointer -> rewritten, or why nothing obeys it
        self._outer_depth = 0  # of the references that the schema under work is reached by
        self._num_nodes = 0

    def run(self) -> Schema:
        result = self._node(self._schema, "#", 0)
        if result is False:
            raise GrammarError("the JSON schema allows no value at all")
        written = SchemaSize(MAX_WRITTEN_CHARS, _GROWN)  # before it is walked through: parts of it may be shared
        num_chars = written.of(result)
        definitions: Schema = {}
        waiting = list(self._references(result))
        while waiting:
            pointer = waiting.pop()
            if self._names[pointer] not in definitions:
                self._check_target(pointer, 0)
                target = definitions[self._names[pointer]] = self._targets[pointer]
                num_chars += written.of(target)
                if num_chars > MAX_WRITTEN_CHARS:
                    raise GrammarError(_GROWN)
                waiting += self._references(target)
        return {**result, "$defs": definitions} if definitions else result

    def _node(self, node: Any, where: str, depth: int) -> Any:
        """A schema object, or False for "no value"."""
        self._count_node()
        if depth > MAX_DEPTH:
            raise GrammarError(f"{where}: nested more than {MAX_DEPTH} deep")
        if isinstance(node, bool):
            return {} if node else False
        if not isinstance(node, dict):
            raise GrammarError(f"{where}: a schema is an object or a boolean, not {json_type(node)}")
        if is_never(node):
            return False
        _check_keywords(node, where)
        node = {key: value for key, value in node.items() if key in _KNOWN}
        while "allOf" in node or ("$ref" in node and len(node) > 1):
            node = self._folded(node, where)
            depth += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"{where}: allOf or $ref leads back to itself")
        if "$ref" in node:
            reference = self._reference(node["$ref"], where)
            self._check_target(self._pointers[reference], depth)
            return {"$ref": reference}
        if "anyOf" in node or "oneOf" in node:
            return self._alternatives(node, where, depth)
        if "enum" in node or "const" in node:
            return values_of(node, where, self._budget)
        return self._typed(node, where, depth)

    def _count_node(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise GrammarError(f"the JSON schema has more than {MAX_NODES} schemas inside; make it smaller")

    # ---- references and combinations ------------------------------------------------------------------------------

    def _reference(self, pointer: Any, where: str) -> str:
        target, seen = self._user.resolve(pointer, where), {pointer}
        while isinstance(target, dict) and "$ref" in target and not set(target) & (_KNOWN - {"$ref"}):
            pointer = target["$ref"]
            if pointer in seen:
                raise GrammarError(f"{where}/$ref: {pointer} leads only back to itself")
            seen.add(pointer)
            target = self._user.resolve(pointer, where)
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
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
            parts.append(self._user.resolve(node["$ref"], where))
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
                rest = merge(rest, {**part, "allOf": [self._user.resolve(target, at)]}, at)
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
        if key == "oneOf":
            branches = self._told_apart(branches, where)
        done, empty = [], []
        for place, branch in enumerate(branches):
            at = f"{where}/{key}/{place}"
            if rest and branch is not True and branch is not False:
                branch = {"allOf": [rest, branch]}
            elif rest and branch is True:
                branch = rest
            try:
                rewritten = self._node(branch, at, depth + 1)
            except EmptySchema as error:
                empty.append(error)
                continue
            if rewritten is not False:
                done.append(rewritten)
        if not done and empty:
            raise empty[0]
        if not done:
            return False
        if key == "oneOf":
            self._check_disjoint(done, where)
        return done[0] if len(done) == 1 else {"anyOf": done}

    def _told_apart(self, branches: list[Any], where: str) -> list[Any]:
        """The branches of a `oneOf`, those of one inside it beside them. Properties with a constant (pydantic's
        discriminators with a default) are required where that tells branches apart: less than what is valid."""
        flat: list[Any] = []
        for branch in branches:
            is_inner = isinstance(branch, dict) and branch.keys() & _KNOWN == {"oneOf"}
            is_inner = is_inner and isinstance(branch["oneOf"], list)
            flat += self._told_apart(branch["oneOf"], where) if is_inner else [branch]
        self._num_nodes += len(flat)
        opened = [self._raw(branch, where) for branch in flat]
        if not all(isinstance(each, dict) for each in opened) or are_disjoint(opened, self._budget):
            return flat
        names = telling_names(opened, self._budget)
        return [self._with_required(branch, each, own) for branch, each, own in zip(flat, opened, names, strict=True)]

    def _raw(self, branch: Any, where: str) -> Any:
        """A branch as it was written, behind its reference."""
        if isinstance(branch, dict) and branch.keys() & _KNOWN == {"$ref"}:
            return self._user.resolve(branch["$ref"], where)
        return branch

    def _with_required(self, branch: Schema, opened: Schema, names: list[str]) -> Schema:
        required = opened.get("required", [])
        missing = [name for name in names if name not in required] if isinstance(required, list) else []
        if not missing or opened.keys() & {"allOf", "$ref", "anyOf", "oneOf"}:
            return branch
        changed = {**opened, "required": [*required, *missing]}
        if opened is branch:
            return changed
        # A schema of its own, to be referred to: what it refers to may lead back to it.
        return {"$ref": self._user.changed(branch["$ref"], changed)}

    def _check_target(self, pointer: Pointer, depth: int) -> None:
        """Rewrite what a reference points to, to raise EmptySchema where the reference stands when nothing obeys it."""
        if pointer not in self._targets and self._outer_depth + depth <= MAX_DEPTH:
            self._targets[pointer] = {}  # meanwhile, for references back to it
            self._outer_depth += depth + 1
            try:
                self._targets[pointer] = self._target(pointer)
            except EmptySchema as error:
                self._targets[pointer] = error
            self._outer_depth -= depth + 1
        target = self._targets.get(pointer)
        if isinstance(target, EmptySchema):
            raise target

    def _target(self, pointer: Pointer) -> Schema:
        where = place_of(pointer)
        node = self._node(self._user.resolve(pointer, where), where, 0)
        if node is False:
            raise EmptySchema(f"{where}: it is referred to, but allows no value")
        assert isinstance(node, dict)
        return node

    def _references(self, node: Any) -> Iterator[Pointer]:
        """The pointers that a rewritten schema refers to."""
        for child in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
            yield from self._references(child)
        reference = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(reference, str) and reference in self._pointers:  # else a property of that name
            yield self._pointers[reference]

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
        target = self._user.resolve(pointer, where)
        return target if isinstance(target, dict) and "allOf" not in target else {}

    # ---- one type -------------------------------------------------------------------------------------------------

    def _typed(self, node: Schema, where: str, depth: int) -> Any:
        types = types_of(node, where)
        if types is None:
            return {}
        branches, empty = [], []
        for name in types:
            try:
                branches.append(self._one_type(name, node, where, depth))
            except EmptySchema as error:
                empty.append(error)
        if not branches:
            raise empty[0]
        return {"anyOf": branches} if len(branches) > 1 else branches[0]

    def _one_type(self, name: str, node: Schema, where: str, depth: int) -> Schema:
        own = {key: value for key, value in node.items() if key in FAMILIES.get(name, ())}
        match name:
            case "string":
                own = string_of(own, where, self._budget)
            case "number" | "integer":
                own = number_of(own, name, where)
            case "array":
                return self._array(own, where, depth)
            case "object":
                own = self._object(own, where, depth)
        return {"type": name, **own}

    def _array(self, own: Schema, where: str, depth: int) -> Schema:
        is_unique = own.pop("uniqueItems", False)
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
        if items is False and "prefixItems" in own and own.get("minItems", 0) > len(own["prefixItems"]):
            raise EmptySchema(
                f"{where}: minItems {own['minItems']} is above the {len(own['prefixItems'])} items there can be"
            )
        if items is False and not own.get("prefixItems"):
            own.pop("prefixItems", None)
            own["items"], own["maxItems"] = {}, 0
        check_order(own, "minItems", "maxItems", where)
        if is_unique and own.get("maxItems", 2) > 1:
            return self._unique(own, where)
        return {"type": "array", **own}

    def _unique(self, own: Schema, where: str) -> Schema:
        """Arrays that hold no value twice: of a few known values, in their order."""
        items = own["items"]
        items = self._targets.get(self._pointers.get(items.get("$ref", ""), ""), items) if items else {}
        return unique_arrays(own, items, where, self._budget)

    def _object(self, own: Schema, where: str, depth: int) -> Schema:
        if own.pop("unevaluatedProperties", False) is not False:
            raise GrammarError(f"{where}/unevaluatedProperties: only false; use additionalProperties")
        declared = own.get("properties", {})
        if len(declared) > MAX_PROPERTIES:
            raise GrammarError(f"{where}/properties: {len(declared)} of them, the limit is {MAX_PROPERTIES}")
        more = own.get("additionalProperties", "properties" not in own and "patternProperties" not in own)
        more = self._node(more, f"{where}/additionalProperties", depth + 1)
        patterns, matching = self._patterns(own, declared, where, depth)
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError(f"{where}/required: a list of names is expected")
        required = list(dict.fromkeys(required))
        self._budget.spend(len(required))
        properties: Schema = {}
        for name, schema in declared.items():
            rewritten = self._node(schema, f"{where}/properties/{name}", depth + 1)
            if rewritten is not False:
                properties[name] = rewritten
            elif name in required:
                raise EmptySchema(f"{where}/required: {name} allows no value")
        for name in required:
            if name in properties:
                continue
            open_by_default = more if own.get("additionalProperties") is not None else {}
            properties[name] = matching.get(name, open_by_default)
            if properties[name] is False:
                raise EmptySchema(f"{where}/required: {name} is not among the properties, and no others are allowed")
        names = own.get("propertyNames")
        if isinstance(names, bool):
            if not names:
                raise GrammarError(f"{where}/propertyNames: only pattern, lengths and enum, not false")
            names = None
            del own["propertyNames"]
        if names is not None:
            if properties or patterns:
                raise GrammarError(f"{where}/propertyNames: only without properties; name them, or leave it out")
            rewritten = self._node({"type": "string", **names}, f"{where}/propertyNames", depth + 1)
            if set(rewritten) - {"type", *STRING_KEYWORDS, "enum"}:
                raise GrammarError(f"{where}/propertyNames: only pattern, lengths and enum")
            own["propertyNames"] = rewritten
        if more is False:
            own.pop("propertyNames", None)  # it would let names in again
        check_order(own, "minProperties", "maxProperties", where)
        if "patternProperties" in own or len(declared) > sum(name in properties for name in declared):
            more = False  # the libraries would let a name in whose value is limited here, or that is forbidden
        check_count(own, len(properties), len(required), more is False and not patterns, where)
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
            try:
                clean = whole(pattern)
                wanted = NamePattern(pattern, self._budget)
            except GrammarError as error:
                raise GrammarError(f"{where}/patternProperties/{pattern[:40]}: {error}") from None
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


def is_never(node: Schema) -> bool:
    """`{"not": {}}`, a common spelling of false."""
    return set(node) - ANNOTATIONS == {"not"} and node["not"] in ({}, True)


def _check_keywords(node: Schema, where: str) -> None:
    for key, instead in UNSUPPORTED.items():
        if key in node:
            raise GrammarError(f"{where}/{key}: the keyword {key} cannot be enforced; {instead}")
