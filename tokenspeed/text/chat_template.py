"""Messages to prompt: renders a model's chat template and tokenizes the result.

Special tokens come from the template alone: what users wrote passes through `text.shield` first, so that no message,
tool description or template argument can forge the end of a turn. For ordinary text the ids equal those of the
`apply_chat_template` of `transformers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta

from tokenspeed.protocol.errors import ConfigError, InvalidRequest
from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.messages import joined, normalize_messages
from tokenspeed.text.shield import Shield
from tokenspeed.text.template_content import Shape, content_shape, render_shaped
from tokenspeed.text.template_env import ChatTemplateEnvironment, TemplateRefusal

MAX_CACHED_TEMPLATES = 16

_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")

_OURS = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered prompt. `marked` holds `breaker` inside every spelling of a special token that a user wrote."""

    marked: str
    breaker: str

    @property
    def text(self) -> str:
        """The prompt as text."""
        return self.marked.replace(self.breaker, "")


class ChatTemplate:
    """The templates of one model. Safe for threads.

    Args:
        sources: Jinja text by name; `default`, and `tool_use` for requests with tools where there is one.
        special_tokens: variables every template may use, `bos_token` and so on.
        spellings: of all special tokens, which users' text must not form.
    """

    def __init__(
        self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str], spellings: Iterable[str]
    ) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._spellings = tuple(spellings)
        self._environment = ChatTemplateEnvironment()
        self._compile = functools.lru_cache(maxsize=MAX_CACHED_TEMPLATES)(self._environment.from_string)
        self._shape = functools.lru_cache(maxsize=MAX_CACHED_TEMPLATES)(self._find_shape)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation.

        Args:
            tools: function descriptions in OpenAI's shape.
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: end inside the last message, so that the model goes on with it.
            chat_template: the name of one of the model's templates, or the text of another.
            template_kwargs: further variables (`enable_thinking`).

        Raises:
            InvalidRequest: bad messages, no or a broken template, or the template refused.
        """
        arguments = dict(template_kwargs or {})
        if taken := [name for name in arguments if name in _OURS]:
            raise InvalidRequest(
                f"chat_template_kwargs sets {taken[0]}, which has a field of its own", "chat_template_kwargs"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; set the latter to false",
                param="continue_final_message",
            )
        source = self._choose(chat_template, bool(tools))
        chat = normalize_messages(messages)
        self._check_roles(chat)
        shield = Shield(self._spellings, (chat, tools or (), documents or (), arguments, source))
        chat = shield.protect(chat)
        if continue_final_message:
            _mark_final(chat, shield.mark)
        self._compiled(source)  # a template that is not valid says so first
        variables = {
            **self._special_tokens,
            **shield.protect(arguments),
            "tools": shield.protect(list(tools)) if tools else None,
            "documents": shield.protect(list(documents)) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        marked = render_shaped(
            self._shape(source), chat, lambda each: self._run(source, {**variables, "messages": each})
        )
        if continue_final_message:
            marked = _cut_final(marked, shield.mark)
        return RenderedChat(marked, shield.breaker)

    @property
    def text(self) -> str:
        """The Jinja text of all templates, the default first; "" when there is none."""
        return "\n".join(sorted(self._sources.values(), key=lambda source: source is not self._sources.get("default")))

    def variables(self) -> frozenset[str]:
        """Names that the templates read and do not set themselves (`tools`, `enable_thinking`)."""
        found: set[str] = set()
        for source in self._sources.values():
            try:
                found |= meta.find_undeclared_variables(self._environment.parse(source))
            except TemplateSyntaxError:  # rendering it will say so
                continue
        return frozenset(found)

    def check(self) -> None:
        """Compile every template.

        Raises:
            TemplateSyntaxError: one is not valid Jinja.
        """
        for source in self._sources.values():
            self._compile(source)

    def _check_roles(self, chat: list[dict[str, Any]]) -> None:
        """Some templates write `'<|' + role + '|>'`, so a role that is part of a special token could become one."""
        for index, message in enumerate(chat):
            role = message["role"]
            if role not in _USUAL_ROLES and any(role in spelling for spelling in self._spellings):
                raise InvalidRequest(
                    f"messages[{index}].role is {role!r}, which is part of a special token; use one of "
                    f"{', '.join(_USUAL_ROLES)}",
                    param="messages",
                )

    def _choose(self, chat_template: str | None, has_tools: bool) -> str:
        if chat_template is not None:
            return self._sources.get(chat_template, chat_template)
        if has_tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if len(self._sources) == 1:
            return next(iter(self._sources.values()))
        if self._sources:
            names = ", ".join(sorted(self._sources))
            raise InvalidRequest(
                f"the model has several chat templates ({names}) and none is the default; start the server with "
                "--chat-template and one of these names (in Python: chat_template)",
                param="messages",
            )
        raise InvalidRequest(
            "the model has no chat template; start the server with --chat-template, or use /v1/completions",
            param="messages",
        )

    def _find_shape(self, source: str) -> Shape:
        return content_shape(self._environment.parse(source))

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        template = self._compiled(source)
        try:
            return self._environment.render_bounded(template, variables)
        except TemplateRefusal as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # a template is code: it may raise anything
            chat = variables["messages"]
            if any("content" not in message for message in chat):
                # Assistant messages that only call tools have no content; some templates cannot bear that.
                chat = [{"content": "", **message} for message in chat]
                return self._run(source, {**variables, "messages": chat})
            raise InvalidRequest(
                f"the chat template cannot render the messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _compiled(self, source: str) -> Template:
        try:
            return self._compile(source)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", param="chat_template"
            ) from error


def load_chat_template(tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """The templates found beside the tokenizer (maybe none), or `override` in place of all: the name of one of them, or
    the text of another.

    Raises:
        ConfigError: `override` is not valid Jinja.
    """
    found = tokenizer.chat_templates
    sources = found if override is None else {"default": found.get(override, override)}
    template = ChatTemplate(sources, special_tokens=tokenizer.special_tokens, spellings=tokenizer.special_spellings)
    if override is not None:
        try:
            template.check()
        except TemplateSyntaxError as error:
            raise ConfigError(f"--chat-template is not valid Jinja: line {error.lineno}: {error.message}") from error
    return template


def render_chat_ids(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
) -> list[int]:
    """Render, then tokenize; arguments and errors as in `ChatTemplate.render`. Adds no bos: templates write it.

    Args:
        check: given the rendered text; may refuse it before it is tokenized.
    """
    rendered = template.render(
        messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
    )
    if check is not None:
        check(rendered.text)
    return tokenizer.encode_rendered(rendered.marked, rendered.breaker)


def _mark_final(chat: list[dict[str, Any]], mark: str) -> None:
    content = chat[-1].get("content")
    if content is None:
        raise InvalidRequest(
            "continue_final_message is set, but the last message has no content to continue", "continue_final_message"
        )
    # The space behind the mark tells afterwards whether the template trimmed the message.
    # One text, so that it can be found again at the prompt's end.
    chat[-1]["content"] = joined(content) + mark + " "


def _cut_final(rendered: str, mark: str) -> str:
    at = rendered.rfind(mark)
    if at < 0:
        raise InvalidRequest(
            "continue_final_message is set, but the chat template leaves the last message out", "continue_final_message"
        )
    return rendered[:at] if rendered[at + 1 : at + 2] == " " else rendered[:at].rstrip()
