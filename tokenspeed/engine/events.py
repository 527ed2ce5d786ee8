"""Events on their way to one consumer. Used on the event loop's thread only.

A consumer that lags (a slow connection) must not make the queue grow with every step: news of the same sequence is
merged while it waits, so a request holds at most one event a sequence and each token once.
"""

from __future__ import annotations

import asyncio

from tokenspeed.engine.interface import GenerationEvent


class EventQueue:
    """One producer, one consumer."""

    def __init__(self) -> None:
        self._pending: dict[int, GenerationEvent] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: GenerationEvent) -> None:
        """Queue an event, or merge it into the one of the same sequence that still waits."""
        known = self._pending.get(event.index)
        if known is None:
            self._pending[event.index] = event
        else:
            merge(known, event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[GenerationEvent]:
        """Everything queued, at most one event a sequence; waits for the first."""
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken = list(self._pending.values())
        self._pending = {}
        return taken


def merge(known: GenerationEvent, news: GenerationEvent) -> None:
    """Append `news` to the earlier event `known` of the same sequence, in place."""
    known.text += news.text
    known.token_ids += news.token_ids
    known.logprobs += news.logprobs
    known.prompt_logprobs += news.prompt_logprobs
    known.num_cached_tokens = news.num_cached_tokens
    known.num_output_tokens = news.num_output_tokens
    known.finish_reason = news.finish_reason
    known.stop_reason = news.stop_reason
    known.error = news.error
    known.error_code = news.error_code
