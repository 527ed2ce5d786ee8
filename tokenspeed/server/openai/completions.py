"""POST /v1/completions: its wire types and both directions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.interface import GenerationEvent, GenerationRequest, LogprobEntry, TokenizerFace
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.body import read_json, to_struct
from tokenspeed.server.context import ServerContext, check_off_loop, generate
from tokenspeed.server.openai.answer import answer, stream_rules
from tokenspeed.server.openai.constraint import constraint_chars, constraint_of
from tokenspeed.server.openai.fields import (
    REFUSED,
    GenerationFields,
    Int32,
    check_priority,
    check_stream,
    drop_refused,
    request_id_of,
    to_sampling,
)
from tokenspeed.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsBuilder,
    PromptLogprob,
    join,
    prompt_logprobs,
)
from tokenspeed.server.openai.prompts import tokenize_prompts
from tokenspeed.server.openai.streaming import ChoiceWriter, Delta, StreamRules, encode_json
from tokenspeed.server.openai.usage import Usage
from tokenspeed.server.schema import documented

DEFAULT_MAX_TOKENS = 16  # OpenAI's

COMPLETION_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "thinking_budget": ((None,), "it belongs to chat; a completion's text is not read for reasoning"),
    "suffix": ((None, ""), "fill-in-the-middle is not built yet"),
    "parallel_tool_calls": ((None, True, False), "completions call no tools"),
    "prompt_embeds": ((None,), "prompts are text or token ids"),
}


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}

MAX_SEQUENCES = 1024
"""Of one request, prompts times n: each has a stream of its own to be set up before the event loop turns again."""


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """A completion request.

    Fields:
        prompt: text, token ids, an array of texts or an array of arrays of token ids. Special tokens spelled in a text
            are those tokens. Choice `i` belongs to prompt `i // n`.
        max_tokens: default 16. 0 with echo: only the prompt (with its logprobs when asked).
        logprobs: logprobs of the output's tokens with that many alternatives, 0 to 20; with echo the prompt's too.
        echo: the prompt's text stands before the output.
        best_of: only when equal to n.
        add_special_tokens: let the tokenizer add what it adds to a text (a beginning-of-sequence token); default true.
    """

    prompt: Annotated[str | list[Any], msgspec.Meta(extra_json_schema=_PROMPT_SCHEMA)]
    logprobs: Int32 | None = None
    echo: bool | None = None
    best_of: Int32 | None = None
    add_special_tokens: bool | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One output. `matched_stop` and `stop_reason` are one thing: the stop string or token id that ended it, if any."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


Events = AsyncGenerator[tuple[int, GenerationEvent], None]
Prompt = tuple[str | None, list[int]]


def router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to a server."""
    routes = APIRouter()

    @routes.post("/v1/completions", **documented("OpenAI", CompletionRequest, CompletionResponse, streams=True))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts, whole or as a stream of server-sent events."""
        context.check_accepting()
        body = parse(await read_json(request))
        context.check_model(body.model)
        priority = check_priority(body, context.config.allow_priority)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_echo_only = bool(body.echo) and max_tokens == 0
        # An echoed prompt's logprobs come from computing it, and the engine computes a prompt in order to sample after
        # it: echo alone samples one token that is never shown.
        echo_logprobs = body.logprobs if body.echo else None
        sampling = to_sampling(
            body,
            context.client.model_config,
            max_tokens=1 if is_echo_only else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=_wider(body.prompt_logprobs, echo_logprobs),
        )
        grammar = await check_off_loop(constraint_chars(body), constraint_of, body)
        prompts = await tokenize_prompts(context, body.prompt, body.add_special_tokens is not False)
        if len(prompts) * (body.n or 1) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n = {body.n} are {len(prompts) * (body.n or 1)} sequences, the limit is "
                f"{MAX_SEQUENCES}; send several requests",
                param="n",
            )
        request_id = context.claim_id("cmpl", request_id_of(body))
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        jobs = [
            GenerationRequest(one_id, token_ids, sampling, priority, body.cache_salt, grammar)
            for one_id, (_, token_ids) in zip(ids, prompts, strict=True)
        ]
        events = generate(context, jobs)
        if is_echo_only:
            events = _without_output(events)
        if echo_logprobs is not None and body.stream and sampling.n > 1:
            events = _prompt_first(events)
        reply = CompletionReply(request_id, context.config, body, prompts, context.client.tokenizer)
        rules = stream_rules(context, body, body.logprobs is not None) if body.stream else None
        return await answer(context, request, request_id, events, reply, rules)

    return routes


def parse(fields: dict[str, Any]) -> CompletionRequest:
    """The body as a typed request.

    Raises:
        InvalidRequest: an unknown, refused or malformed field, or two that contradict each other.
    """
    body = to_struct(drop_refused(fields, REFUSED, COMPLETION_REFUSED), CompletionRequest)
    check_stream(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {body.n or 1}; ranking more outputs than are returned is not offered, "
            "so best_of must equal n",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "max_tokens is 0, which is only for echo = true; it must be at least 1", param="max_tokens"
        )
    if body.max_tokens == 0 and body.min_tokens:
        raise InvalidRequest(f"min_tokens is {body.min_tokens}, above max_tokens 0", param="min_tokens")
    return body


def _wider(first: int | None, second: int | None) -> int | None:
    """The larger of two optional counts."""
    given = [count for count in (first, second) if count is not None]
    return max(given) if given else None


async def _without_output(events: Events) -> Events:
    """The same prompts without what was sampled after them."""
    async with aclosing(events):
        async for prompt, event in events:
            event.text, event.token_ids, event.logprobs, event.num_output_tokens = "", [], [], 0
            if event.finish_reason is not None:
                event.finish_reason, event.stop_reason = "length", None
            yield prompt, event


async def _prompt_first(events: Events) -> Events:
    """Holds a prompt's other sequences back until sequence 0, which brings the prompt's logprobs, has spoken."""
    seen: set[int] = set()
    held: dict[int, list[GenerationEvent]] = {}
    async with aclosing(events):
        async for prompt, event in events:
            if event.index != 0 and prompt not in seen:
                held.setdefault(prompt, []).append(event)
                continue
            yield prompt, event
            seen.add(prompt)
            for waiting in held.pop(prompt, []):
                yield prompt, waiting


@dataclass(slots=True)
class _Output:
    """One choice while it grows."""

    offsets: CompletionLogprobsBuilder = field(default_factory=CompletionLogprobsBuilder)
    delta: Delta = field(default_factory=Delta)
    last: GenerationEvent | None = None


class CompletionReply:
    """Writes one request's events as completion chunks or as one completion."""

    num_reasoning_tokens = 0

    def __init__(
        self,
        request_id: str,
        config: ServerConfig,
        body: CompletionRequest,
        prompts: list[Prompt],
        tokenizer: TokenizerFace,
    ) -> None:
        self._id = request_id
        self._model = config.served_model_names[0]
        self._fingerprint = config.weight_version
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._n = body.n or 1
        self._num_logprobs = body.logprobs
        self._num_prompt_logprobs = body.prompt_logprobs
        self._echo = bool(body.echo)
        self._skips_special = body.skip_special_tokens is not False
        self._wants_ids = bool(body.return_token_ids)
        self._prompts = prompts
        self._prompt_logprobs: dict[int, list[LogprobEntry]] = {}
        self._outputs = [_Output() for _ in range(self._n * len(prompts))]
        self._head = b'data: {"id":%s,"object":"text_completion","created":%d,"model":%s,"system_fingerprint":%s' % (
            encode_json(request_id),
            self._created,
            encode_json(self._model),
            encode_json(self._fingerprint),
        )
        self._text_heads = [self._head + b',"choices":[{"index":%d,"text":' % i for i in range(len(self._outputs))]

    def writer(self, rules: StreamRules) -> ChoiceWriter:
        """Writes the same reply as chunks."""
        return ChoiceWriter(self, rules)

    def open(self, choice: int, prompt: int, event: GenerationEvent) -> bytes | None:
        """The echoed prompt, and the prompt's ids when asked."""
        self._keep_prompt_logprobs(prompt, event)
        if not (self._echo or self._wants_ids):
            return None
        text = encode_json(self._prompt_text(prompt) if self._echo else "")
        wants_logprobs = self._echo and self._num_logprobs is not None
        logprobs = encode_json(self._echo_logprobs(choice, prompt)) if wants_logprobs else b"null"
        ids = b""
        if self._wants_ids:
            ids = b',"prompt_token_ids":' + encode_json(self._prompts[prompt][1]) + b',"token_ids":[]'
        return self._text_heads[choice] + text + b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]"

    def text(self, choice: int, text: str) -> bytes:
        """A chunk of only text."""
        return self._text_heads[choice] + encode_json(text) + b',"logprobs":null,"finish_reason":null}]'

    def delta(self, choice: int, delta: Delta) -> bytes:
        """A chunk with text and what else was asked."""
        logprobs = b"null"
        if self._num_logprobs is not None:
            logprobs = encode_json(self._outputs[choice].offsets.add(delta.logprobs))
        ids = b',"token_ids":' + encode_json(delta.token_ids) if self._wants_ids else b""
        text = encode_json("".join(delta.text))
        return self._text_heads[choice] + text + b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]"

    def finish(self, choice: int, event: GenerationEvent) -> bytes:
        """The choice's last chunk."""
        stop = encode_json(event.stop_reason)
        return self._text_heads[choice] + (
            b'"","logprobs":null,"finish_reason":%s,"matched_stop":%s,"stop_reason":%s}]'
            % (encode_json(event.finish_reason), stop, stop)
        )

    def usage(self) -> bytes:
        """The start of the chunk with no choices."""
        return self._head + b',"choices":[]'

    def note(self, prompt: int, event: GenerationEvent) -> None:
        """Collect an event for the whole answer."""
        self._keep_prompt_logprobs(prompt, event)
        output = self._outputs[prompt * self._n + event.index]
        output.delta.add(event)
        output.last = event

    def whole(self, usage: Usage) -> CompletionResponse:
        """The whole answer, after all sequences have ended."""
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index) for index in range(len(self._outputs))],
            usage=usage,
            system_fingerprint=self._fingerprint,
        )

    def _choice(self, choice: int) -> CompletionChoice:
        prompt = choice // self._n
        output = self._outputs[choice]
        assert output.last is not None and output.last.finish_reason is not None
        logprobs = None
        if self._num_logprobs is not None:
            first = self._echo_logprobs(choice, prompt) if self._echo else None
            rest = output.offsets.add(output.delta.logprobs)
            logprobs = join(first, rest) if first is not None else rest
        shown = self._num_prompt_logprobs is not None
        return CompletionChoice(
            index=choice,
            text=(self._prompt_text(prompt) if self._echo else "") + "".join(output.delta.text),
            logprobs=logprobs,
            finish_reason=output.last.finish_reason,
            matched_stop=output.last.stop_reason,
            stop_reason=output.last.stop_reason,
            token_ids=output.delta.token_ids if self._wants_ids else msgspec.UNSET,
            prompt_token_ids=self._prompts[prompt][1] if self._wants_ids else msgspec.UNSET,
            prompt_logprobs=(
                prompt_logprobs(_narrow(self._prompt_logprobs[prompt], self._num_prompt_logprobs or 0))
                if shown
                else msgspec.UNSET
            ),
        )

    def _prompt_text(self, prompt: int) -> str:
        text, token_ids = self._prompts[prompt]
        return text if text is not None else self._tokenizer.decode(token_ids, self._skips_special)

    def _echo_logprobs(self, choice: int, prompt: int) -> CompletionLogprobs:
        offsets = self._outputs[choice].offsets
        first = offsets.first_prompt_token(self._prompts[prompt][1][0], self._prompt_text(prompt), self._tokenizer)
        return join(first, offsets.add(_narrow(self._prompt_logprobs[prompt], self._num_logprobs or 0)))

    def _keep_prompt_logprobs(self, prompt: int, event: GenerationEvent) -> None:
        if event.index == 0 and prompt not in self._prompt_logprobs:
            self._prompt_logprobs[prompt] = event.prompt_logprobs


def _narrow(entries: list[LogprobEntry], num_top: int) -> list[LogprobEntry]:
    """Entries with at most `num_top` alternatives: echo and prompt_logprobs may have asked for different counts."""
    return [replace(entry, top=entry.top[:num_top]) for entry in entries]
