"""Items: what `/v1/responses` takes as input, gives as output and keeps. Wire types only.

One struct serves both directions, so that an answer's output can be sent back as input without a change.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text", kw_only=True, forbid_unknown_fields=True):
    """Text that the model reads."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True, forbid_unknown_fields=True):
    """Text that the model wrote. `annotations` and `logprobs` are always empty here.

    In an input, `annotations` must be empty: they would say what the text cites, which the model is not shown.
    `logprobs` of another server's answer may be there and change nothing: they say nothing of the text.
    """

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal", kw_only=True, forbid_unknown_fields=True):
    """What another server marked as a refusal; text like any other for the model. Never made here."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True, forbid_unknown_fields=True):
    """The model's reasoning, as it wrote it."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", kw_only=True, forbid_unknown_fields=True):
    """A summary of reasoning. Never made here."""

    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True, forbid_unknown_fields=True):
    """A message. `id`, `status` and `phase` come back with an answer's output and change nothing in an input."""

    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    phase: Literal["commentary", "final_answer"] | msgspec.UnsetType = msgspec.UNSET


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True, forbid_unknown_fields=True):
    """Reasoning before what follows it.

    Fields:
        summary: empty in answers; an input's is read when there is neither content nor encrypted_content.
        content: the reasoning's text.
        encrypted_content: the same text in a form to be sent back unread; when asked for by `include`.
    """

    id: str | None = None
    status: Status | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, forbid_unknown_fields=True):
    """The model's wish to call a function. `arguments` is a JSON object as text, unless `status` is incomplete.

    Fields:
        namespace: that the function stands in; not there when it stands alone.
    """

    id: str | None = None
    status: Status | None = None
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class FunctionCallOutputItem(
    msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True, forbid_unknown_fields=True
):
    """What the function gave. `name` and `namespace` are the call's own, and change nothing."""

    id: str | None = None
    status: Status | None = None
    call_id: str
    name: str | msgspec.UnsetType = msgspec.UNSET
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    output: str | list[InputText]


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
OutputItem = ReasoningItem | MessageItem | FunctionCallItem
