"""What the offline API returns: finished requests, gathered from events. No torch, no asyncio."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.engine.interface import GenerationEvent, LogprobEntry
from tokenspeed.protocol.messages import FinishReason


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences.

    Fields:
        token_ids: all output tokens; a stop token is the last one.
        logprobs: one an id, or None when not asked.
        finish_reason: stop, length, abort or error.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and others.
        error: the message, for finish_reason "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what came of it.

    Fields:
        prompt: its text, or None when it came as token ids or as messages.
        prompt_logprobs: entry i is for prompt position i + 1; None when not asked.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[LogprobEntry] | None = None
    num_cached_tokens: int = 0

    def take(self, event: GenerationEvent) -> None:
        """Add the news of one sequence."""
        output = self.outputs[event.index]
        output.text += event.text
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += event.logprobs
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += event.prompt_logprobs
        if event.index == 0:
            self.num_cached_tokens = event.num_cached_tokens
        output.finish_reason = event.finish_reason
        output.stop_reason = event.stop_reason
        output.error = event.error
