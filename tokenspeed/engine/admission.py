"""Which requests enter the engine: the checks a request must pass, and the bounded queue. No torch, no asyncio."""

from __future__ import annotations

import math

import msgspec

from tokenspeed.engine.interface import GenerationRequest, TokenizerFace
from tokenspeed.protocol.errors import ContextNumbers, Field, InvalidRequest, Overloaded
from tokenspeed.protocol.sampling import SamplingParams

CONTEXT_EXCEEDED = "context_length_exceeded"
_RETRY_MAX_S = 10
_MAX_BYTES_A_CHAR = 4  # of UTF-8; no text has more tokens than bytes, the special ones around it apart
_DURATION_WEIGHT = 0.1  # of the newest request in the running mean


def check_request(request: GenerationRequest, vocab_size: int, max_model_len: int) -> SamplingParams:
    """Check what only the model's limits can tell.

    Returns:
        The sampling parameters as the engine takes them: `max_tokens` set, `top_k` within the vocabulary.

    Raises:
        InvalidRequest: names the value, the limit and the remedy.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    _check_ids("prompt", (min(prompt), max(prompt)), vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    left = max_model_len - len(prompt)
    if left < 1:
        raise _too_long(str(len(prompt)), max_model_len)
    wanted = sampling.max_tokens
    if wanted is not None and wanted > left:
        raise InvalidRequest(
            [
                f"the context length is {max_model_len} tokens, but {len(prompt) + wanted} were asked for "
                f"({len(prompt)} in the prompt, {wanted} as ",
                Field("max_tokens"),
                "); shorten the prompt or lower ",
                Field("max_tokens"),
                f" to at most {left}",
            ],
            param="max_tokens",
            code=CONTEXT_EXCEEDED,
            numbers=ContextNumbers(context_len=max_model_len, num_prompt=len(prompt), max_tokens=wanted),
        )
    if sampling.min_tokens > left:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, but a prompt of {len(prompt)} tokens leaves {left} of the context "
            f"length {max_model_len}; lower min_tokens or shorten the prompt",
            param="min_tokens",
            code=CONTEXT_EXCEEDED,
        )
    if wanted is None or sampling.top_k > vocab_size:
        max_tokens = left if wanted is None else wanted
        return msgspec.structs.replace(sampling, max_tokens=max_tokens, top_k=min(sampling.top_k, vocab_size))
    return sampling


def check_fits(tokenizer: TokenizerFace, text: str, max_model_len: int) -> None:
    """Refuse a prompt's text that cannot fit, before time and memory are spent on tokenizing it.

    Raises:
        InvalidRequest: as for a prompt of as many ids.
    """
    if len(text) * _MAX_BYTES_A_CHAR <= max_model_len:
        return
    least = tokenizer.least_tokens(text)
    if least >= max_model_len:
        raise _too_long(f"at least {least}", max_model_len)


def _too_long(num_tokens: str, max_model_len: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens; the context length is {max_model_len} tokens, of which the output needs "
        "at least one; shorten the prompt",
        param="prompt",
        code=CONTEXT_EXCEEDED,
    )


def _check_ids(param: str, token_ids: tuple[int, ...] | dict[int, float], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {token_id}; ids of this model are 0 to {vocab_size - 1}", param=param
            )


class Gate:
    """The bounded queue in front of the engine: counts live requests and refuses those that find the line full.

    A request waits when it has no output yet and no slot is free for it, or when the engine's last snapshot (up to
    0.1 s old) says so. A burst inside that time may therefore overshoot the limit by up to `max_num_seqs`.

    Args:
        max_queue_len: requests that may wait; None = no limit.
        max_num_seqs: sequences that may run.
    """

    def __init__(self, max_queue_len: int | None, max_num_seqs: int) -> None:
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._num_silent = 0  # live requests without output
        self._num_speaking = 0  # live sequences of the others
        self._duration_s = 1.0

    def admit(self, num_waiting_engine: int) -> None:
        """Count a request in.

        Args:
            num_waiting_engine: waiting requests in the engine's last snapshot.

        Raises:
            Overloaded: the queue is full.
        """
        waiting = self._num_silent + 1 - max(0, self._max_num_seqs - self._num_speaking)
        if num_waiting_engine:
            waiting = max(waiting, 1 + min(num_waiting_engine, self._num_silent))
        if self._max_queue_len is not None and waiting > self._max_queue_len:
            raise Overloaded(
                f"the queue is full: {waiting - 1} requests wait, --max-queue-len is {self._max_queue_len}; "
                "try again later",
                # As a sequence ends, a place in the queue gets free.
                retry_after_s=min(_RETRY_MAX_S, max(1, math.ceil(self._duration_s / self._max_num_seqs))),
            )
        self._num_silent += 1

    def began(self, num_sequences: int) -> None:
        """A request has its first output."""
        self._num_silent -= 1
        self._num_speaking += num_sequences

    def ended(self, num_sequences: int, has_begun: bool, duration_s: float) -> None:
        """A request that was counted in is over."""
        if has_begun:
            self._num_speaking -= num_sequences
        else:
            self._num_silent -= 1
        self._duration_s += _DURATION_WEIGHT * (duration_s - self._duration_s)
