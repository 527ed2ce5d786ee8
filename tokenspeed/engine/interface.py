"""What the server and the offline API ask of the engine's client. Server tests use a fake with this face.

The client owns text: it renders chat templates, tokenizes, detokenizes, finds stop strings (and aborts the engine's
request when one is found) and turns channel messages into `GenerationEvent`s. It never imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec
from tokenspeed.protocol.messages import CommandName, EngineStats, FinishReason, KVGroup, ProfileOptions
from tokenspeed.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the client takes it, already in token ids.

    Fields:
        request_id: unique; the server makes it (`chatcmpl-...`).
        prompt_token_ids: the prompt.
        sampling: max_tokens may be None = as many as the context allows.
        priority, cache_salt, grammar: see `messages.AddRequest`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    grammar: GrammarSpec | None = None


@dataclass(slots=True)
class LogprobEntry:
    """One position's logprobs with text. `token` is the token's own text (replacement characters for partial UTF-8),
    `token_bytes` its exact bytes; `top` the alternatives, best first (each with an empty `top`)."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    rank: int = 0
    top: list[LogprobEntry] = field(default_factory=list)


@dataclass(slots=True)
class GenerationEvent:
    """News of one sequence of a request, in order. Exactly one event a sequence has `finish_reason`; none follows it.

    Fields:
        index: sequence in [0, n).
        text: new text, never part of a character, never text that a stop string may still take back.
        token_ids: the ids behind it since the last event (text may lag behind ids).
        logprobs: one an id, when asked.
        prompt_logprobs: on the first event of index 0, when asked: entry i is for prompt position i + 1.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: running counts of this sequence.
        finish_reason: stop, length, abort or error.
        stop_reason: the matched stop string or stop token id, None for end-of-sequence and others.
        error: the message, for finish_reason "error".
        error_code: see `messages.SequenceOutput`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None


class TokenizerFace(Protocol):
    """What server and client use of `text.tokenizer.Tokenizer`."""

    vocab_size: int
    special_ids: frozenset[int]

    @property
    def strips_leading_space(self) -> bool:
        """Decoding drops a text's first space."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """`parse_special` False: special-token spellings in `text` are ordinary text. True: they are the tokens."""
        ...

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, told without tokenizing it."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def token_to_id(self, spelling: str) -> int | None:
        """The id of a token with exactly this spelling."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for (its spelling in UTF-8 for special tokens)."""
        ...


class EngineClient(Protocol):
    """One connection to an engine, in this process or another.

    Fields:
        template_text: Jinja text of the model's chat templates, "" without one. Tells which parsers fit.
        template_variables: the names that they read.
        grammar_kinds: what an output may be held to.
        kv_capacity_tokens: tokens of context that many sequences have together while they decode.
        kv_groups: what a full pool holds for each group of layers.
    """

    model_config: ModelConfig
    max_model_len: int
    tokenizer: TokenizerFace
    template_text: str
    template_variables: frozenset[str]
    grammar_kinds: frozenset[GrammarKind]
    kv_capacity_tokens: int
    kv_groups: list[KVGroup]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        """Chat template, then token ids; special tokens written by the user inside a message stay ordinary text.

        Args:
            must_fit: what is certain to pass the context length is refused before it is tokenized.
        Raises:
            InvalidRequest: the template raised, or a message has a shape it cannot take, or it is too long to fit.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Submit and stream. Closing the iterator early (disconnect) aborts the request in the engine.

        Raises (before the first event):
            InvalidRequest: too long (names both numbers), token id out of range, empty prompt, a grammar that cannot be
                compiled.
            Overloaded: bounded queue full, or draining.
            EngineDead: the engine is gone. After the first event, engine death gives an `error` event instead.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Abort by id; its sequences end with finish_reason "abort"."""
        ...

    async def command(
        self, name: CommandName, timeout_s: float = 20.0, profile: ProfileOptions | None = None
    ) -> tuple[bool, str | None]:
        """Run a command in the engine loop.

        Args:
            profile: of `start_profile`.
        Returns:
            (True, what the command has to say, if anything), or (False, error).
        """
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine process has died or said Fatal."""
        ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest snapshot."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones, then end what is left with an error event."""
        ...

    async def close(self) -> None: ...
