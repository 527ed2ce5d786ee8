"""Logprobs in the three shapes of the field: OpenAI chat, OpenAI completions, vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
import math

import msgspec

from tokenspeed.engine.interface import LogprobEntry, TokenizerFace

# JSON has no minus infinity; OpenAI's API writes this for "as good as impossible".
_IMPOSSIBLE = -9999.0


class TopLogprob(msgspec.Struct, kw_only=True):
    """An alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A position of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """`choices[].logprobs` of chat."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """`choices[].logprobs` of completions. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """An entry of vLLM's prompt_logprobs."""

    logprob: float
    rank: int
    decoded_token: str


def chat_logprobs(entries: list[LogprobEntry]) -> ChatLogprobs:
    """Chat's shape."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=entry.token,
                logprob=_finite(entry.logprob),
                bytes=list(entry.token_bytes),
                top_logprobs=[
                    TopLogprob(token=top.token, logprob=_finite(top.logprob), bytes=list(top.token_bytes))
                    for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: list[LogprobEntry]) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's shape: None for the first prompt token, then id -> entry, the prompt's own token included."""
    result: list[dict[int, PromptLogprob] | None] = [None]
    for entry in entries:
        result.append(
            {
                one.token_id: PromptLogprob(logprob=_finite(one.logprob), rank=rank, decoded_token=one.token)
                for rank, one in [*enumerate(entry.top, 1), (entry.rank, entry)]
            }
        )
    return result


class CompletionLogprobsBuilder:
    """Completions' shape for one choice, piece by piece: it remembers how many characters came before.

    A token that ends inside a character counts for the offset only when the character is whole.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def first_prompt_token(self, token_id: int, echoed: str, tokenizer: TokenizerFace) -> CompletionLogprobs:
        """The first token of a prompt echoed as `echoed`; nothing predicted it."""
        token_bytes = tokenizer.token_bytes(token_id)
        # A beginning-of-sequence token that the tokenizer added is no part of the text, so it takes no room in it.
        is_shown = echoed.startswith(token_bytes.decode(errors="ignore")) or tokenizer.decode([token_id], True) != ""
        return CompletionLogprobs(
            tokens=[_key(token_bytes)],
            token_logprobs=[None],
            top_logprobs=[None],
            text_offset=[self._advance(token_bytes if is_shown else b"")],
        )

    def add(self, entries: list[LogprobEntry]) -> CompletionLogprobs:
        """The next positions."""
        return CompletionLogprobs(
            tokens=[_key(entry.token_bytes) for entry in entries],
            token_logprobs=[_finite(entry.logprob) for entry in entries],
            top_logprobs=[
                {_key(one.token_bytes): _finite(one.logprob) for one in [*entry.top, entry]} for entry in entries
            ],
            text_offset=[self._advance(entry.token_bytes) for entry in entries],
        )

    def _advance(self, token_bytes: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return offset


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def _key(token_bytes: bytes) -> str:
    """A token's spelling; for half characters OpenAI's `bytes:\\xe2`, so that two of them do not fall together."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
