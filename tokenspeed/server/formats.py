"""Which parsers read this server's answers: chosen once, from flags, architecture and chat template."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import EngineClient
from tokenspeed.text.parsers.interface import ReasoningFormat, ToolFormat
from tokenspeed.text.parsers.registry import reasoning_formats, tool_formats
from tokenspeed.text.parsers.select import AUTO, HasArchitecture, select_reasoning, select_tools

logger = logging.getLogger("tokenspeed.server")


@dataclass(frozen=True, slots=True)
class Formats:
    """The model's formats.

    Fields:
        knows_calls: False when `auto` found no format of tool calls: the model's own calls cannot be read then.
            (`passthrough`, named by the flag, is a wish: calls stay text.)
    """

    reasoning: ReasoningFormat = reasoning_formats()["passthrough"]
    tools: ToolFormat = tool_formats()["passthrough"]
    knows_calls: bool = True


def check_names(config: ServerConfig, model: HasArchitecture) -> None:
    """Find a misspelled flag before the model is loaded.

    Raises:
        ConfigError: a flag names no format.
    """
    select_reasoning(config.reasoning_parser, model, "")
    select_tools(config.tool_call_parser, model, "")


def choose_formats(config: ServerConfig, client: EngineClient) -> Formats:
    """The formats that the flags name, or that fit the model; the log says why.

    Raises:
        ConfigError: a flag names no format.
    """
    reasoning = select_reasoning(config.reasoning_parser, client.model_config, client.template_text)
    tools = select_tools(config.tool_call_parser, client.model_config, client.template_text)
    logger.info("%s; %s", reasoning.reason, tools.reason)
    found_none = config.tool_call_parser == AUTO and "passthrough" in tools.format.names
    return Formats(reasoning.format, tools.format, not found_none)
