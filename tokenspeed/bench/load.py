"""Runs sessions against a server at their arrival times, with a limit on how many run together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tokenspeed.bench.http_client import RequestResult
from tokenspeed.bench.sessions import Conversation, Piece, Session

Send = Callable[[int, Conversation], Awaitable[RequestResult]]


async def run_load(
    sessions: list[Session],
    arrivals: list[float],
    send: Send,
    answer: Callable[[RequestResult], Piece],
    max_concurrency: int | None,
    on_result: Callable[[RequestResult], None],
) -> list[RequestResult]:
    """All results, session by session and turn by turn; a session ends at its first failed turn.

    A request is timed from when it is sent, so that waiting for the limit is not part of its latency.

    Args:
        arrivals: seconds from the start, one a session.
        send: sends the due turn of a conversation; gets the request's number.
        answer: the answer as a piece of the next prompt.
        max_concurrency: sessions that run together; None = no limit.
        on_result: called with each result as it comes.
    """
    room = asyncio.Semaphore(max_concurrency or max(1, len(sessions)))
    started_s = time.perf_counter()
    first_number = 0

    async def run(session: Session, arrival_s: float, number: int) -> list[RequestResult]:
        await asyncio.sleep(max(0.0, started_s + arrival_s - time.perf_counter()))
        conversation = Conversation(session)
        results: list[RequestResult] = []
        async with room:
            while conversation.due is not None:
                result = await send(number + len(results), conversation)
                results.append(result)
                on_result(result)
                if result.error is not None:
                    break
                conversation.take(answer(result))
        return results

    work: list[Awaitable[Any]] = []
    for session, arrival_s in zip(sessions, arrivals, strict=True):
        work.append(run(session, arrival_s, first_number))
        first_number += len(session.turns)
    return [result for results in await asyncio.gather(*work) for result in results]
