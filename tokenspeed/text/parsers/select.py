"""Which reasoning and which tool format serve a model, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tokenspeed.protocol.errors import ConfigError
from tokenspeed.text.parsers.interface import ModelTraits, ReasoningFormat, ToolFormat
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats

AUTO = "auto"

_F = TypeVar("_F", ReasoningFormat, ToolFormat)


class HasArchitecture(Protocol):
    """What selection needs of `config.model.ModelConfig`."""

    @property
    def architecture(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ReasoningFactory:
    """The chosen format, and a line for the log that says why."""

    format: ReasoningFormat
    reason: str


@dataclass(frozen=True, slots=True)
class ToolFactory:
    """The chosen format, and a line for the log that says why."""

    format: ToolFormat
    reason: str


def select_reasoning(name: str, model: HasArchitecture, chat_template: str) -> ReasoningFactory:
    """The format called `name`, or for "auto" the model's own ("passthrough" when none fits).

    A model whose whole output is channels (gpt-oss) cannot be read as think tags: there "base", which the public recipe
    passes, means the model's own format.

    Args:
        chat_template: the template's text; "" when the model has none.
    Raises:
        ConfigError: there is no such name. Lists those that exist.
    """
    traits = ModelTraits(model.architecture, chat_template)
    chosen, reason = _select("--reasoning-parser", name, reasoning_formats(), traits)
    own, why = _match(reasoning_formats(), traits)
    if "base" in chosen.names and own.whole is not None:
        return ReasoningFactory(own, f"reasoning parser {own.names[0]}: {name!r} was asked for, but {why}")
    return ReasoningFactory(chosen, f"reasoning parser {chosen.names[0]}: {reason}")


def select_tools(name: str, model: HasArchitecture, chat_template: str) -> ToolFactory:
    """Like `select_reasoning`, for tool calls."""
    traits = ModelTraits(model.architecture, chat_template)
    chosen, reason = _select("--tool-call-parser", name, tool_formats(), traits)
    return ToolFactory(chosen, f"tool-call parser {chosen.names[0]}: {reason}")


def _select(flag: str, name: str, formats: Mapping[str, _F], traits: ModelTraits) -> tuple[_F, str]:
    if name == AUTO:
        return _match(formats, traits)
    if name not in formats:
        raise ConfigError(f"{flag} {name!r} does not exist; choose one of {', '.join([AUTO, *sorted(formats)])}")
    return formats[name], "named by the flag"


def _match(formats: Mapping[str, _F], traits: ModelTraits) -> tuple[_F, str]:
    """The best format that finds itself in the traits; passthrough always does."""
    unique = {one.names[0]: one for one in formats.values()}.values()
    fitting = sorted((one for one in unique if one.why_not(traits) is None), key=lambda one: (one.rank, one.names[0]))
    best = fitting[0]
    others = ", ".join(one.names[0] for one in fitting[1:] if one.names[0] != "passthrough")
    if best.names[0] == "passthrough":
        return best, f"no format is known for {traits.architecture} and its chat template"
    found = f"it fits {traits.architecture} and its chat template"
    return best, found + (f" (so would {others}, less closely)" if others else "")
