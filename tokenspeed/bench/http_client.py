"""One streamed request to an OpenAI-compatible server, with the time of every chunk. The only file that has aiohttp.

A chunk is timed when its bytes arrive; chunks that arrive together share a time. Only chunks that carry something of
the answer count as tokens: the first one with a role and the last one with a finish reason do not.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

READ_BUFFER_BYTES = 2**22
ERROR_CHARS = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def answer(self) -> str:
        """The new text of the answer."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or ""

    @property
    def has_tokens(self) -> bool:
        delta = self.delta
        thinks_or_calls = delta is not None and bool(delta.reasoning_content or delta.reasoning or delta.tool_calls)
        return bool(self.answer or self.token_ids or thinks_or_calls)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class RequestResult:
    """What became of a request. Times are `time.perf_counter()` seconds.

    Fields:
        prompt_len, output_len, cached_len: tokens, as the server's usage says; without one, output_len counts chunks.
        token_times: when each chunk with tokens arrived.
        ended_s: when the answer's last chunk arrived, usage not counted.
        error: why it failed, or None.
    """

    started_s: float
    prompt_len: int = 0
    output_len: int = 0
    cached_len: int = 0
    token_times: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first chunk with tokens; None when no chunk showed any."""
        return self.token_times[0] - self.started_s if self.token_times else None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for a single token, and when no chunk showed any."""
        if self.output_len < 2 or self.ttft_s is None:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between chunks with tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `request_s` limits one request as a whole."""

    connect_s: float = 30.0
    read_s: float = 1800.0
    request_s: float = 3600.0


def open_session(
    headers: Mapping[str, str] | None = None, timeouts: Timeouts | None = None, insecure: bool = False
) -> aiohttp.ClientSession:
    """A session without a limit of its own on connections. Use as an async context manager.

    Args:
        insecure: accept any TLS certificate.
    """
    limits = timeouts or Timeouts()
    timeout = aiohttp.ClientTimeout(total=limits.request_s, sock_connect=limits.connect_s, sock_read=limits.read_s)
    connector = aiohttp.TCPConnector(limit=0, ssl=not insecure)
    return aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout, read_bufsize=READ_BUFFER_BYTES, trust_env=False
    )


async def stream_request(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> RequestResult:
    """Send a streaming request and read its answer. Never raises for what the server or the network does: see `error`.

    Args:
        body: with "stream": true; `stream_options.include_usage` gives exact counts.
    """
    result = RequestResult(time.perf_counter())
    try:
        async with session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:ERROR_CHARS]}"
                return result
            await _read(response, result)
    except TimeoutError:
        result.error = "timed out"
    except (aiohttp.ClientError, OSError, msgspec.DecodeError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    return result


async def _read(response: aiohttp.ClientResponse, result: RequestResult) -> None:
    finished, usage = False, None
    texts: list[str] = []
    async for arrived_s, data in _events(response):
        chunk = _decode(data)
        if chunk.error is not None:
            result.error = f"the stream ended in an error: {chunk.error}"[:ERROR_CHARS]
            return
        for choice in chunk.choices:
            result.ended_s = arrived_s
            texts.append(choice.answer)
            result.token_ids += choice.token_ids or []
            finished = finished or choice.finish_reason is not None
        if any(choice.has_tokens for choice in chunk.choices):
            result.token_times.append(arrived_s)
        usage = chunk.usage or usage
    result.text = "".join(texts)
    result.output_len = len(result.token_times)
    if usage is not None:
        result.prompt_len, result.output_len = usage.prompt_tokens, usage.completion_tokens
        result.cached_len = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    if not finished:
        result.error = "the stream ended without a finish_reason"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """(time of arrival, data) of the JSON events of a server-sent event stream."""
    buffer = b""
    async for block in response.content.iter_any():
        arrived_s = time.perf_counter()
        buffer = (buffer + block).replace(b"\r\n", b"\n")  # joined first: a block may end between the two
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield arrived_s, event[6:]


async def find_model(
    session: aiohttp.ClientSession,
    base_url: str,
    timeout_s: float,
    poll_s: float = 0.1,
    on_wait: Callable[[str], None] | None = None,
) -> str:
    """Wait until the server answers `/v1/models`, and the first model's id.

    Args:
        on_wait: called once, before the first wait, with what the server said.
    Raises:
        TimeoutError: it does not within `timeout_s` seconds; the message says what it answered last.
    """
    deadline_s = time.perf_counter() + timeout_s
    said = "nothing"
    while True:
        try:
            async with session.get(f"{base_url}/v1/models") as response:
                if response.status == 200:
                    return str((await response.json())["data"][0]["id"])
                said = f"HTTP {response.status}: {(await response.text())[:ERROR_CHARS]}"
                if response.status in (401, 403):
                    raise TimeoutError(f"{base_url}/v1/models answers {said}")
        except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        if time.perf_counter() >= deadline_s:
            raise TimeoutError(f"{base_url}/v1/models does not answer within {timeout_s:g} s (last: {said})")
        if on_wait is not None:
            on_wait(said)
            on_wait = None
        await asyncio.sleep(poll_s)
