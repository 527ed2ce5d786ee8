"""The request of `/v1/responses`: its wire type, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.spec import ANY_OBJECT
from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.server.body import to_struct
from tokenspeed.server.openai.fields import ANYTHING, CacheSalt, GenerationFields, Int32, Int64, drop_refused
from tokenspeed.server.responses_api.conversation import plain_input
from tokenspeed.server.responses_api.items import Item
from tokenspeed.server.responses_api.namespaces import Function
from tokenspeed.server.responses_api.response import (
    ReasoningConfig,
    TextConfig,
    Tool,
    ToolChoiceField,
)

CARRIED_REASONING = "reasoning.encrypted_content"

FIELD_NAMES: Mapping[str, str] = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
"""What this API calls the fields that chat completions have."""

# (values that change nothing here, why any other is refused)
RESPONSES_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((None,), "there are none"),
    "background": ((None, False), "responses are made while the client waits"),
    "background_options": ((None,), "responses are made while the client waits"),
    "context_management": ((None, []), "compaction is the client's"),
    "conversation": ((None,), "use previous_response_id, or send all items"),
    "image": ((None,), "this model takes text only"),
    "max_tool_calls": ((None,), "it limits built-in tools, and there are none"),
    "moderation": ((None,), "there is no moderation"),
    "prompt": ((None,), "prompt templates are not stored here; send instructions and input"),
    "service_tier": ((None, "auto", "default"), "there is only the default tier"),
    "top_logprobs": ((None, 0), "use /v1/chat/completions"),
    "truncation": ((None, "disabled"), "nothing is dropped from an input that is too long; shorten it"),
}

_REASONING_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "context": ((None, "auto"), "the chat template decides which earlier reasoning the model sees"),
    "generate_summary": (ANYTHING, "there is no summary, for the reasoning itself is in the answer"),
    "mode": ((None, "standard"), "there is one mode"),
}
_STREAM_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "include_obfuscation": ((None, False), "events are never padded"),
}

# What only outputs of tools that are not offered hold, and inputs that are not taken: there is nothing to leave out.
_NEVER_THERE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

# Tools that OpenAI's servers run, and those of the client's that are no functions. Agents name them in every request
# without asking whether the server has them, so they are left out: the model is not shown them and cannot call them.
NOT_OFFERED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`. Events are never padded: include_obfuscation is only false."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request for a response. Taken without any effect on what is generated: metadata, client_metadata, user,
    safety_identifier, prompt_cache_key, prompt_cache_options, prompt_cache_retention.

    Fields (those that OpenAI's reference does not tell):
        instructions: text only; a list of items belongs into input.
        tools: functions, also inside namespaces; tools of other kinds are left out (`NOT_OFFERED`).
        include: "reasoning.encrypted_content"; parts of outputs that are never made here change nothing.
        tool_choice: none, auto, required, `{"type": "function", "name": ...}` or `{"type": "allowed_tools", ...}`.
        top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, seed, ignore_eos, priority, cache_salt,
            chat_template_kwargs: as in chat completions.
    """

    input: list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    ignore_eos: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse(fields: dict[str, Any]) -> ResponsesRequest:
    """The body as a typed request.

    Raises:
        InvalidRequest: an unknown, refused or malformed field.
    """
    plain = dict(drop_refused(fields, RESPONSES_REFUSED))
    if "input" not in plain:
        raise InvalidRequest("the field 'input' is required", param="input", code="missing_field")
    plain["input"] = plain_input(plain["input"])
    if isinstance(plain.get("tools"), list):
        plain["tools"] = _offered(plain["tools"])
    for name, table in (("reasoning", _REASONING_REFUSED), ("stream_options", _STREAM_REFUSED)):
        if isinstance(plain.get(name), dict):
            plain[name] = drop_refused(plain[name], table, where=name)
    _check_choice(plain.get("tool_choice"))
    body = to_struct(plain, ResponsesRequest)
    for name in body.include or ():
        if name != CARRIED_REASONING and name not in _NEVER_THERE:
            raise InvalidRequest(
                f"include holds {name[:80]!r}, there is only {CARRIED_REASONING!r}",
                param="include",
                code="unsupported_field",
            )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream = true", param="stream_options")
    _check_metadata(body.metadata or {})
    _check_format(body.text)
    return body


def generation_fields(body: ResponsesRequest) -> GenerationFields:
    """The request's sampling fields as chat's `to_sampling` reads them."""
    return GenerationFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
    )


def to_grammar(text: TextConfig | None) -> GrammarSpec | None:
    """What the answer's text has to obey.

    Raises:
        InvalidRequest: a schema that cannot be enforced; names the keyword.
    """
    if text is None or text.format.type == "text":
        return None
    param = "text.format.schema"
    schema = ANY_OBJECT if text.format.type == "json_object" else text.format.schema
    return GrammarSpec(kind="json_schema", text=json.dumps(rewrite_schema(schema, param)), param="text.format")


def chat_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools in the shape of chat completions, which templates and parsers read."""
    return [
        {
            "type": "function",
            "function": {
                "name": each.flat_name,
                **({} if each.description is None else {"description": each.description}),
                "parameters": each.tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for each in functions
    ]


def _offered(tools: list[Any], where: str = "tools") -> list[Any]:
    """The tools, those inside namespaces too, without those of `NOT_OFFERED`, and without what an SDK writes null for.

    Raises:
        InvalidRequest: a kind of tool that nobody knows.
    """
    kept = []
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        at = f"{where}[{number}]"
        if kind == "namespace" and where == "tools":
            given = tool.get("tools")
            inside = _offered(given, f"{at}.tools") if isinstance(given, list) else given
            kept += [] if inside == [] else [{**tool, "tools": inside}]
            continue
        if isinstance(kind, str) and kind != "function":
            if kind in NOT_OFFERED:
                continue
            raise InvalidRequest(
                f"{at} is of type {kind[:80]!r}; only tools of type function are offered, which the client runs "
                "itself, alone or in a namespace",
                param=f"{at}.type",
                code="unsupported_tool",
            )
        kept.append(_function(tool, at))
    return kept


def _function(tool: Any, where: str) -> Any:
    """A function without `async`, which is no name of a field here."""
    if not isinstance(tool, dict) or "async" not in tool:
        return tool
    if tool["async"] not in (None, False):
        raise InvalidRequest(
            f"{where}.async cannot be used: an output is the next request's; leave it out",
            param=f"{where}.async",
            code="unsupported_field",
        )
    return {key: value for key, value in tool.items() if key != "async"}


def _check_choice(choice: Any) -> None:
    """Raises:
    InvalidRequest: `tool_choice` forces or allows a tool that is not offered.
    """
    if not isinstance(choice, dict):
        return
    among = choice.get("tools") if choice.get("type") == "allowed_tools" else None
    for each in (choice, *(among if isinstance(among, list) else ())):
        kind = each.get("type") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind in NOT_OFFERED:
            raise InvalidRequest(
                f"tool_choice names a tool of type {echo(kind)}, which is not offered here; only functions are, which "
                "the client runs itself",
                param="tool_choice",
                code="unsupported_tool",
            )


def _check_format(text: TextConfig | None) -> None:
    if text is None:
        return
    given = text.format
    is_schema = given.type == "json_schema"
    for name in ("name", "schema"):
        if is_schema and getattr(given, name) is msgspec.UNSET:
            raise InvalidRequest(f"text.format.{name} is required with json_schema", param=f"text.format.{name}")
    for name in ("name", "schema", "description", "strict"):
        if not is_schema and getattr(given, name) is not msgspec.UNSET:
            raise InvalidRequest(f"text.format.{name} is only for json_schema", param=f"text.format.{name}")


def _check_metadata(metadata: dict[str, str]) -> None:
    """OpenAI's bounds; metadata is kept with the response."""
    if len(metadata) > 16:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs, the limit is 16", param="metadata")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest(
                f"metadata[{key[:64]!r}]: the key has {len(key)} characters, the limit is 64; the value {len(value)}, "
                "the limit is 512",
                param="metadata",
            )
