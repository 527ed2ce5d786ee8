"""Request bodies made of the official SDKs' own types: one for each field and each value that they name."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

MAX_DEPTH = 9


@dataclass(frozen=True, slots=True)
class Probe:
    """A body, and the field that it is about: `("tools", 0, "strict")`."""

    path: tuple[str | int, ...]
    body: dict[str, Any]

    @property
    def name(self) -> str:
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)[1:]


def probes(root: Any, base: dict[str, Any]) -> Iterator[Probe]:
    """Bodies that say one field more than they have to.

    Args:
        root: the SDK's TypedDict of a request.
        base: the least of a request that is taken.
    """
    yield from _of(root, base, (), lambda value: value, set())


def _of(kind: Any, least: dict[str, Any], path: Any, place: Any, seen: set[Any]) -> Iterator[Probe]:
    if len(path) > MAX_DEPTH:
        return
    for name, hint in get_type_hints(kind).items():
        rest = {key: value for key, value in least.items() if key != name}
        for value in _values(hint):
            yield Probe((*path, name), place({name: value, **rest}))
        for inner, wrap, step in _inner(hint):
            if (inner, name) in seen:
                continue
            seen.add((inner, name))

            def put(value: Any, name: str = name, rest: Any = rest, wrap: Any = wrap) -> Any:
                return place({name: wrap(value), **rest})

            yield from _of(inner, _least(inner), (*path, name, *step), put, seen)


def _values(hint: Any) -> Iterator[Any]:
    """One of each kind that a type has; of literals all."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for each in args:
            yield from _values(each)
    elif origin is Literal:
        yield from args
    elif hint is bool:
        yield from (True, False)
    else:
        yield _one(hint)


def _inner(hint: Any) -> Iterator[tuple[Any, Any, tuple[int, ...]]]:
    """The TypedDicts of a type, how a value stands in it, and the steps to there."""
    origin, args = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        yield hint, lambda value: value, ()
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _inner(each)
    elif args and origin not in (Literal, dict):
        for inner, wrap, steps in _inner(args[0]):
            yield inner, lambda value, wrap=wrap: [wrap(value)], (0, *steps)


def _least(kind: Any) -> dict[str, Any]:
    # `__required_keys__` knows nothing of annotations that are text.
    marked = get_type_hints(kind, include_extras=True)
    needed = [name for name in marked if kind.__total__ or get_origin(marked[name]) is Required]
    hints = get_type_hints(kind)
    return {name: _one(hints[name]) for name in needed}


def _one(hint: Any) -> Any:
    """The simplest value of a type."""
    origin, args = get_origin(hint), get_args(hint)
    plain = {str: "x", int: 1, float: 0.5, bool: False, type(None): None, object: {}, Any: {}}
    if is_typeddict(hint):
        return _least(hint)
    if origin in (Union, types.UnionType):
        return _one(args[0])
    if origin is Literal:
        return args[0]
    if hint in plain:
        return plain[hint]
    if origin is dict or hint is dict or (isinstance(origin, type) and issubclass(origin, typing.Mapping)):
        return {}
    return [_one(args[0])] if args else {}
