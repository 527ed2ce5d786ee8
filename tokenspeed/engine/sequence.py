"""One sequence at the client: token ids from the engine become text, and stop strings end it.

Owns the order of things: which tokens count, which text may go out, which of two endings wins. Detokenizing and
matching themselves are in text/. No torch, no asyncio.
"""

from __future__ import annotations

import functools

from tokenspeed.engine.interface import GenerationEvent, LogprobEntry, TokenizerFace
from tokenspeed.protocol.messages import FinishReason, Logprobs, SequenceOutput
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.stop import StopChecker

_TEXTS_REMEMBERED = 16384


class TokenTexts:
    """Text of single tokens for logprobs; remembers the common ones."""

    def __init__(self, tokenizer: TokenizerFace) -> None:
        self._bytes = functools.lru_cache(maxsize=_TEXTS_REMEMBERED)(tokenizer.token_bytes)

    def entry(self, logprobs: Logprobs) -> LogprobEntry:
        """One position with text; `top` without its own alternatives."""
        entry = self._one(logprobs.token_id, logprobs.logprob, logprobs.rank)
        for place, (token_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)):
            entry.top.append(self._one(token_id, logprob, place + 1))
        return entry

    def _one(self, token_id: int, logprob: float, rank: int) -> LogprobEntry:
        exact = self._bytes(token_id)
        return LogprobEntry(token_id, exact.decode("utf-8", "replace"), exact, logprob, rank)


class SequenceStream:
    """Turns the engine's outputs of one sequence into events; after the terminal one it makes no more.

    Args:
        index: which of the request's n.
        num_prompt_tokens: for the counts.
        eos_token_ids: the model's; ending by one of them is no `stop_reason`.
    """

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        num_prompt_tokens: int,
        eos_token_ids: tuple[int, ...],
        detokenizer: Detokenizer,
        texts: TokenTexts,
    ) -> None:
        self.index = index
        self.is_finished = False
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._eos_token_ids = () if sampling.ignore_eos else eos_token_ids
        self._detokenizer = detokenizer
        self._stop = StopChecker(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        self._texts = texts
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    def feed(self, output: SequenceOutput) -> GenerationEvent:
        """The event for the engine's next output. Must not be called once finished.

        The event is terminal although the output is not when a stop string was completed: the caller then aborts the
        sequence in the engine. Tokens behind the completing one are dropped.
        """
        if output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
        num_kept, text, matched = self._read(output)
        event = self._event(text, output.token_ids[:num_kept])
        event.logprobs = [self._texts.entry(logprobs) for logprobs in output.logprobs[:num_kept]]
        event.prompt_logprobs = [self._texts.entry(logprobs) for logprobs in output.prompt_logprobs]
        if matched is None and output.finish_reason is not None:
            rest, matched = self._flush()
            event.text += rest
            event.finish_reason = output.finish_reason
            event.error, event.error_code = output.error, output.error_code
            if output.stop_token_id is not None and output.stop_token_id not in self._eos_token_ids:
                event.stop_reason = output.stop_token_id
        if matched is not None:
            event.finish_reason, event.stop_reason = "stop", matched
            event.error = event.error_code = None
        self.is_finished = event.finish_reason is not None
        return event

    def end(self, reason: FinishReason, error: str | None) -> GenerationEvent:
        """The terminal event of a sequence that the engine will not end itself. Text held back is dropped."""
        self.is_finished = True
        event = self._event("", [])
        event.finish_reason, event.error = reason, error
        return event

    def _event(self, text: str, token_ids: list[int]) -> GenerationEvent:
        return GenerationEvent(
            self.index,
            text,
            token_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def _read(self, output: SequenceOutput) -> tuple[int, str, str | None]:
        """(tokens that count, text to send, the stop string completed by the last of them)."""
        shown = output.token_ids
        if output.stop_token_id is not None and not self._sampling.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended the sequence counts, but is no text
        if self._stop is None:
            self._num_output_tokens += len(output.token_ids)
            return len(output.token_ids), self._detokenizer.feed(shown), None
        text = ""
        for place, token_id in enumerate(shown):
            self._num_output_tokens += 1
            may_match = self._num_output_tokens >= self._sampling.min_tokens
            piece, matched = self._stop.feed(self._detokenizer.feed((token_id,)), may_match)
            text += piece
            if matched is not None:
                return place + 1, text, matched
        self._num_output_tokens += len(output.token_ids) - len(shown)
        return len(output.token_ids), text, None

    def _flush(self) -> tuple[str, str | None]:
        """What is left when the engine has ended the sequence: an incomplete character, then text held back."""
        text = self._detokenizer.flush()
        if self._stop is None:
            return text, None
        text, matched = self._stop.feed(text, self._num_output_tokens >= self._sampling.min_tokens)
        return text + self._stop.flush(), matched
