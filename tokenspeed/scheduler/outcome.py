"""What a row's result means for its sequence: which tokens count, whether they end it, what the client is told.

Owns the rules of ending and of the news. Changes the sequence's tokens and what has been delivered of it, never its
place, slot or pages: those are the scheduler's.
"""

from __future__ import annotations

import msgspec

from tokenspeed.protocol.messages import AddRequest, FinishReason, Logprobs, SequenceOutput
from tokenspeed.protocol.step import Row, RowResult, TokenLogprobs
from tokenspeed.scheduler.request import Sequence

Taken = tuple[list[int], FinishReason | None, int | None]
"""The tokens that count, the reason if they end the sequence, and the stop token if it was one."""


def continued(sequence: Sequence, row: Row, got: RowResult) -> SequenceOutput | None:
    """What nearly every row comes to: one more token, no end and nothing else to tell. None: it is another case, and
    nothing has changed. (A step of 64 such rows: 32 us, 51 by way of `take_tokens` and `news`.)"""
    token_ids, new_ids = sequence.token_ids, got.token_ids
    if (
        len(new_ids) != 1
        or not row.is_decode
        or not sequence.said_anything
        or new_ids[0] in sequence.stop_ids
        or len(token_ids) + 1 >= sequence.max_len
        or row.draft_token_ids
        or got.logprobs
        or sequence.request.parked
    ):
        return None
    token_ids.append(new_ids[0])
    sequence.num_pending -= 1
    return SequenceOutput(request_id=sequence.request.request_id, index=sequence.index, token_ids=new_ids)


def take_tokens(sequence: Sequence, row: Row, got: RowResult) -> Taken:
    """Append a row's sampled tokens, up to the one that ends the sequence.

    Raises:
        ValueError: tokens that do not fit the row (a bug of the runner).
    """
    new_ids = got.token_ids
    if not row.samples:
        if new_ids:
            raise ValueError(f"slot {row.slot}: tokens from a row that does not sample")
        return new_ids, None, None
    sequence.num_pending -= 1
    if not new_ids or len(new_ids) > 1 + len(row.draft_token_ids):
        raise ValueError(f"slot {row.slot}: {len(new_ids)} tokens for {len(row.draft_token_ids)} drafts")
    token_ids = sequence.token_ids
    for count, token_id in enumerate(new_ids, start=1):
        token_ids.append(token_id)
        if token_id in sequence.stop_ids and sequence.may_stop_at(len(token_ids) - 1):
            return new_ids[:count], "stop", token_id
        if len(token_ids) >= sequence.max_len:
            return new_ids[:count], "length", None
    return new_ids, None, None


def news(sequence: Sequence, new_ids: list[int], got: RowResult | None) -> SequenceOutput:
    """News of a sequence; the first carries the cached tokens, and on index 0 the prompt logprobs."""
    request = sequence.request
    output = SequenceOutput(request_id=request.request_id, index=sequence.index, token_ids=new_ids)
    if got is not None and got.logprobs:
        output.logprobs = on_wire(got.logprobs[: len(new_ids)])
    if not sequence.said_anything:
        sequence.said_anything = True
        output.num_cached_tokens = request.num_cached_tokens
        if new_ids and sequence.wants_prompt_logprobs:
            output.prompt_logprobs = on_wire(request.prompt_logprobs)
            request.prompt_logprobs = []
            # Delivered: after a preemption the prompt may come from the prefix cache.
            sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=None)
    return output


def refusals(request: AddRequest, reason: str) -> list[SequenceOutput]:
    """The terminal outputs of a request that was not taken, one a sequence."""
    return [
        SequenceOutput(request_id=request.request_id, index=index, finish_reason="error", error=reason)
        for index in range(request.sampling.n)
    ]


def on_wire(entries: list[TokenLogprobs]) -> list[Logprobs]:
    """Logprobs as the channel carries them."""
    return [Logprobs(e.token_id, e.logprob, e.rank, e.top_ids, e.top_logprobs) for e in entries]
