"""How a flag is declared, and the argument parser made from such declarations.

A flag is one dataclass field of `args.EngineArgs` whose metadata is a `Flag`. Parser, docs page and freeze test are
all made from these; nothing about a single flag is known here. Values stay unchecked strings and numbers until the
dataclass is built: `check` is called there, so that a configuration made in Python meets the same limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from tokenspeed.config.refused import find_refusal, refused_names
from tokenspeed.protocol.errors import ConfigError


def integer(text: str) -> int:
    """`parse` of a whole number."""
    return int(text)


def number(text: str) -> float:
    """`parse` of a number."""
    return float(text)


def json_object(text: str) -> dict[str, Any]:
    """`parse` of a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


# argparse names the function in "invalid ... value".
integer.__name__, number.__name__, json_object.__name__ = "integer", "number", "JSON object"

Kind = Literal["value", "values", "on", "on_or_off"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag's declaration.

    Fields:
        names: spellings, the first one is the name used in messages.
        help: one or two sentences for `--help` and the docs page.
        group: heading it is listed under.
        kind: `value` takes one value, `values` one or more, `on` none (turns it on), `on_or_off` has a `--no-` twin.
        parse: turns a value's text into the field's type; raises ValueError.
        metavar: how the value is written in help.
        choices: the only values accepted, or empty.
        refused_choices: values that are known but not available here -> why.
        at_least, at_most: limits of a number, both included.
        special: values outside the limits that have a meaning of their own.
        default_text: the default in words, where it is chosen automatically.
        more_off_names: other spellings of the `--no-` twin.
        is_exclusive: giving both the flag and its `--no-` twin is an error (otherwise the last one counts).
        is_secret: never printed.
        only_on: the kind of device that the flag has a meaning on; None = any.
        checked_with_device: which choices there are depends on the device, so `resolve` refuses the others.
    """

    names: tuple[str, ...]
    help: str
    group: str
    kind: Kind = "value"
    parse: Callable[[str], Any] = str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    refused_choices: Mapping[str, str] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    special: tuple[float, ...] = ()
    default_text: str | None = None
    more_off_names: tuple[str, ...] = ()
    is_exclusive: bool = False
    is_secret: bool = False
    only_on: Literal["cpu", "cuda"] | None = None
    checked_with_device: bool = False

    @property
    def off_names(self) -> tuple[str, ...]:
        """The spellings that turn an `on_or_off` flag off."""
        if self.kind != "on_or_off":
            return ()
        return (*("--no-" + name[2:] for name in self.names), *self.more_off_names)

    @property
    def placeholder(self) -> str:
        """How the value is written in help: `auto|cpu|cuda`, or the metavar."""
        return "|".join(self.choices) if self.choices else (self.metavar or "TEXT")


@dataclass(frozen=True, slots=True)
class Declared:
    """A flag together with the field it fills."""

    field_name: str
    default: Any
    flag: Flag


def declared_flags(cls: type) -> tuple[Declared, ...]:
    """Flags of a dataclass in order of declaration."""
    return tuple(
        Declared(item.name, item.default, cast(Flag, item.metadata["flag"])) for item in dataclasses.fields(cls)
    )


def flag(
    default: Any,
    names: str,
    group: str,
    help: str,
    *,
    kind: Kind = "value",
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    refused_choices: Mapping[str, str] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    special: tuple[float, ...] = (),
    default_text: str | None = None,
    more_off_names: tuple[str, ...] = (),
    is_exclusive: bool = False,
    is_secret: bool = False,
    only_on: Literal["cpu", "cuda"] | None = None,
    checked_with_device: bool = False,
) -> Any:
    """A dataclass field that is a flag. `names` are separated by spaces; the rest are the fields of `Flag`."""
    about = Flag(
        names=tuple(names.split()),
        help=help,
        group=group,
        kind=kind,
        parse=parse,
        metavar=metavar,
        choices=choices,
        refused_choices=refused_choices or {},
        at_least=at_least,
        at_most=at_most,
        special=special,
        default_text=default_text,
        more_off_names=more_off_names,
        is_exclusive=is_exclusive,
        is_secret=is_secret,
        only_on=only_on,
        checked_with_device=checked_with_device,
    )
    return dataclasses.field(default=default, metadata={"flag": about})


def check(declared: Declared, value: Any) -> None:
    """Raise ConfigError unless `value` is one the flag accepts. None stands for "automatic" and passes."""
    flag = declared.flag
    name = flag.names[0]
    if value is None or flag.checked_with_device:
        return
    if isinstance(value, tuple):
        for each in value:
            check(declared, each)
        return
    if flag.choices and value not in flag.choices:
        allowed = ", ".join(flag.choices)
        if value in flag.refused_choices:
            raise ConfigError(
                f"{name} {value} is not available in this version: {flag.refused_choices[value]}; use one of: {allowed}"
            )
        close = difflib.get_close_matches(str(value), flag.choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name} is {value!r}, it must be one of: {allowed}{hint}")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value in flag.special:
        return
    low, high = flag.at_least, flag.at_most
    # Written so that NaN fails too.
    if (low is None or value >= low) and (high is None or value <= high):
        return
    if low is not None and high is not None:
        limit = f"between {low:g} and {high:g}"
    else:
        limit = f"at least {low:g}" if low is not None else f"at most {high:g}"
    also = "".join(f", or {value:g}" for value in flag.special)
    raise ConfigError(f"{name} is {value}, it must be {limit}{also}")


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(flags: Sequence[Declared], prog: str) -> argparse.ArgumentParser:
    """The parser of all flags. Positional arguments come back among the unknown ones of `parse_known_args`.

    They are not declared because argparse gives a positional its (empty) value as soon as the first flag is seen,
    so that `serve --port 1 MODEL` would fail.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="MODEL is a folder, a .gguf file or a hub id. Without one the embedded default model is served.",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for item in flags:
        heading = item.flag.group
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add(groups[heading], item)
    return parser


def _add(group: argparse._ArgumentGroup, item: Declared) -> None:
    flag = item.flag
    shown = default_text(item).replace("`", "")
    twin = f" {flag.off_names[0]} turns it off." if flag.off_names else ""
    text = f"{flag.help}{twin} Default: {shown}.".replace("`", "").replace("%", "%%")
    if flag.kind == "on":
        group.add_argument(*flag.names, dest=item.field_name, action="store_true", help=text)
        return
    if flag.kind == "on_or_off":
        twins = group.add_mutually_exclusive_group() if flag.is_exclusive else group
        twins.add_argument(*flag.names, dest=item.field_name, action="store_true", help=text)
        twins.add_argument(*flag.off_names, dest=item.field_name, action="store_false", help=argparse.SUPPRESS)
        return
    group.add_argument(
        *flag.names,
        dest=item.field_name,
        type=flag.parse,
        nargs="+" if flag.kind == "values" else None,
        metavar=flag.placeholder,
        help=text,
    )


def default_text(item: Declared) -> str:
    """The default as shown to a reader."""
    if item.flag.default_text is not None:
        return item.flag.default_text
    if item.default is None or item.default == ():
        return "none"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    if isinstance(item.default, dict):
        return "`{}`"
    return f"`{item.default}`"


def parse_flags(flags: Sequence[Declared], argv: Sequence[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """Parse a command line.

    Returns:
        values of the fields that were given, and the positional arguments.
    Raises:
        ConfigError: a flag that is refused by name, unknown (names the closest one), or whose value has the wrong type.
        SystemExit: after `--help` (argparse prints it and leaves with 0).
    """
    accepted = {name for item in flags for name in (*item.flag.names, *item.flag.off_names)}
    before_separator = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    for word in before_separator:
        name = word.split("=", 1)[0]
        if name.startswith("-") and name not in accepted:
            refusal = find_refusal(name)
            if refusal is not None:
                raise ConfigError(refusal.message(name))
    values, rest = build_parser(flags, prog).parse_known_args(before_separator)
    for word in rest:
        if word.startswith("-") and word != "-":
            raise ConfigError(_unknown(word.split("=", 1)[0], accepted))
    positionals = rest + list(argv[len(before_separator) + 1 :])
    return vars(values), positionals


def _unknown(name: str, accepted: set[str]) -> str:
    spelled = "--" + name.lstrip("-").replace("_", "-")
    if spelled in accepted:
        return f"unknown flag {name}; did you mean {spelled}?"
    close = difflib.get_close_matches(spelled, sorted(accepted), n=1, cutoff=0.7)
    if close:
        return f"unknown flag {name}; did you mean {close[0]}?"
    known = difflib.get_close_matches(spelled, refused_names(), n=1, cutoff=0.85)
    if known:
        return f"unknown flag {name}; {known[0]} is known but not available in this version"
    return f"unknown flag {name}; `tokenspeed serve --help` lists the flags"
