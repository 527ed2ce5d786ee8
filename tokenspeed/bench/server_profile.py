"""The server's own profile around a measured load: `POST /start_profile` before it, `POST /stop_profile` after it.

For servers that have these routes (ours, vLLM, SGLang); the trace is written where the server runs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tokenspeed.protocol.errors import ConfigError

ERROR_CHARS = 500


@dataclass(slots=True)
class Trace:
    """What the server said when the profile was over.

    Fields:
        file: on the server; None from a server that does not say.
        error: why there may be no trace, or None.
    """

    file: str | None = None
    error: str | None = None


@asynccontextmanager
async def profiled(
    http: aiohttp.ClientSession, base_url: str, *, num_steps: int | None, activities: tuple[str, ...]
) -> AsyncIterator[Trace]:
    """Profile what happens within; the trace is filled in at the end, whether or not that failed.

    Args:
        num_steps: after which the profile ends by itself; None = at the end.
        activities: what is recorded; empty = what the server usually records.

    Raises:
        ConfigError: the profile could not be started, in the server's words.
    """
    options: dict[str, Any] = {} if num_steps is None else {"num_steps": num_steps}
    if activities:
        options["activities"] = list(activities)
    _, error = await _post(http, f"{base_url}/start_profile", options)
    if error is not None:
        raise ConfigError(f"--profile: {error}; leave --profile out, or see what the server can profile")
    trace = Trace()
    try:
        yield trace
    finally:
        trace.file, trace.error = await _post(http, f"{base_url}/stop_profile", None)
        if trace.error is not None:
            print(f"the profile may be missing: {trace.error}", file=sys.stderr)


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """(`file` of the answer, what went wrong); each may be None."""
    try:
        async with http.post(url, json=body) as response:
            text = await response.text()
            if response.status != 200:
                return None, f"{url} answers HTTP {response.status}: {text[:ERROR_CHARS]}"
            answer = await response.json() if response.content_type == "application/json" else None
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        return None, f"{url} does not answer ({type(error).__name__}: {error})"
    file = answer.get("file") if isinstance(answer, dict) else None
    return (str(file) if file is not None else None), None
