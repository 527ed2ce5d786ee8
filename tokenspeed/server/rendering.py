"""A conversation to prompt ids: options checked, long ones rendered off the event loop. Knows no wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.context import ServerContext

CHARS_A_VALUE = 16  # what a value costs a template, as characters of text: 300,000 empty messages are no short chat

# What render_chat decides itself; a template variable of that name would speak against it.
_RESERVED_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "conversation",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template sees.

    Fields:
        messages: as templates know them: role, content as text or parts of type text, `tool_calls` with arguments as
            objects, `reasoning_content`.
        tools: in OpenAI's wrapped shape, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        documents: for templates that read them.
        add_generation_prompt: end with the start of an assistant turn; None: unless continue_final_message.
        continue_final_message: let the last (assistant) message go on.
        template_kwargs: further variables.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, Any]] = ()
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


async def render(context: ServerContext, conversation: Conversation, must_fit: bool) -> list[int]:
    """The prompt of a conversation.

    Args:
        must_fit: what cannot fit the context length is refused before it is tokenized.

    Raises:
        InvalidRequest: messages that cannot be rendered, or options that contradict each other.
    """
    messages, continues = list(conversation.messages), conversation.continue_final_message
    if continues and conversation.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both true; a prompt ends in one way",
            param="add_generation_prompt",
        )
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            f"continue_final_message needs a last message of role assistant, it is {messages[-1]['role']}",
            param="continue_final_message",
        )
    if continues and messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "the last message calls tools, so there is nothing to continue; send the calls' results behind it",
            param=f"messages[{len(messages) - 1}]",
        )
    kwargs = dict(conversation.template_kwargs)
    for name in sorted(_RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs.{name} cannot be set; the request has a field for it", param="chat_template_kwargs"
        )
    tools, documents = list(conversation.tools), list(conversation.documents)
    if documents and "documents" not in context.client.template_variables:
        raise InvalidRequest(
            "documents cannot be used: the model's chat template does not read them; put them into a message",
            param="documents",
        )
    wanted = conversation.add_generation_prompt

    def run() -> list[int]:
        return context.client.render_chat(
            messages,
            tools=tools or None,
            documents=documents or None,
            add_generation_prompt=not continues if wanted is None else wanted,
            continue_final_message=continues,
            template_kwargs=kwargs or None,
            must_fit=must_fit,
        )

    return await context.texts.run(num_chars([messages, tools, documents, kwargs]), run)


def num_chars(value: Any) -> int:
    """About how much JSON-like `value` gives a template to do: its strings' characters, and some for each value."""
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        total += CHARS_A_VALUE
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return total
