"""The `response` object of `/v1/responses`. Wire types only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenspeed.server.openai.tools import ToolName
from tokenspeed.server.responses_api.items import OutputItem

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """A function on offer. `parameters` is a JSON schema.

    Fields:
        strict: arguments obey the schema: of forced calls (`tool_choice` required or a function) they always do, of
            others too, or the request is refused.
        defer_loading: changes nothing: there is no tool_search, so the model is shown the function at once.
        output_schema: changes nothing: it describes the output to programs, and there are none.
        allowed_callers: with "direct" or not at all.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | msgspec.UnsetType | None = msgspec.UNSET
    output_schema: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    allowed_callers: list[Literal["direct", "programmatic"]] | msgspec.UnsetType | None = msgspec.UNSET


class NamespaceTool(msgspec.Struct, tag_field="type", tag="namespace", kw_only=True, forbid_unknown_fields=True):
    """Functions that a client knows by a common name and their own."""

    name: ToolName
    description: str | None = None
    tools: list[FunctionTool]


Tool = FunctionTool | NamespaceTool


class NamedFunction(msgspec.Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """`tool_choice`: this function, once. Without `namespace`, one inside a namespace is found when no other has its
    name."""

    name: str
    namespace: str | msgspec.UnsetType | None = msgspec.UNSET


class NamedNamespace(msgspec.Struct, tag_field="type", tag="namespace", kw_only=True, forbid_unknown_fields=True):
    """All functions of this namespace."""

    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """`tool_choice`: `mode`, among these functions. The prompt shows all tools, so that its prefix stays cached."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction | NamedNamespace]


ToolChoiceField = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text. All but `type` is for `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | msgspec.UnsetType = msgspec.UNSET
    schema: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`: the form of the answer. `verbosity` changes nothing: the models served so far have no such setting."""

    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`.

    Fields:
        effort: none and minimal turn thinking off; the others go to the chat template.
        summary: changes nothing: there is no summary, for the reasoning itself is in the answer.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """`cached_tokens` were found in the prefix cache. Nothing is charged for writing it, so that count is 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """`reasoning_tokens` of the output were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """What the response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True, frozen=True):
    """A response, at one moment of its life."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: ToolChoiceField
    tools: list[Tool]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str]
