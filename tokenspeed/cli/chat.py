"""`tokenspeed chat`: a small terminal client of a running server. Speaks only the public HTTP API."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import httpx

from tokenspeed.protocol.errors import ConfigError, TokenSpeedError

DEFAULT_URL = "http://127.0.0.1:8000"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def run(argv: Sequence[str]) -> int:
    """Chat until end of input or an empty line."""
    parser = _Parser(
        prog="tokenspeed chat",
        allow_abbrev=False,
        description="Chat with a running server. An empty line or Ctrl-D ends the chat.",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the server (default {DEFAULT_URL})")
    parser.add_argument("--model", help="model name (default: the first one the server has)")
    parser.add_argument("--api-key", help="key, if the server wants one")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="sampling temperature (default: the server's)")
    args = parser.parse_args(argv)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with httpx.Client(base_url=args.url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as http:
        body: dict[str, Any] = {"model": args.model or first_model(http)}
        if args.max_tokens is not None:
            body["max_tokens"] = args.max_tokens
        if args.temperature is not None:
            body["temperature"] = args.temperature
        system = [{"role": "system", "content": args.system}] if args.system else []
        converse(http, body, system, _ask, _show)
    return 0


def converse(
    http: httpx.Client,
    body: dict[str, Any],
    messages: list[dict[str, str]],
    ask: Callable[[], str | None],
    show: Callable[[str], None],
) -> None:
    """Ask, answer, repeat. `ask` returns None at the end; `show` gets pieces of text, and a newline after each answer.

    A failed answer is shown and its question forgotten, so that the chat can go on.
    """
    history = list(messages)
    while (text := ask()) is not None:
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            for piece in stream_chat(http, {**body, "messages": [*history, question]}):
                pieces.append(piece)
                show(piece)
        except TokenSpeedError as error:
            show(f"\n[{error}]\n")
            continue
        show("\n")
        history += [question, {"role": "assistant", "content": "".join(pieces)}]


def first_model(http: httpx.Client) -> str:
    """The server's own model name."""
    try:
        response = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise TokenSpeedError(
            f"no server at {http.base_url} ({error}); start one with `tokenspeed serve` or give its address with --url"
        ) from error
    if response.status_code != 200:
        raise TokenSpeedError(_reason(response))
    return str(response.json()["data"][0]["id"])


def stream_chat(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of one answer.

    Raises:
        TokenSpeedError: the server refused, sent an error event, or went away.
    """
    try:
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise TokenSpeedError(_reason(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise TokenSpeedError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", []):
                    if content := choice.get("delta", {}).get("content"):
                        yield content
    except httpx.HTTPError as error:
        raise TokenSpeedError(f"lost the server at {http.base_url}: {error}") from error


def _reason(response: httpx.Response) -> str:
    """The server's own words, in OpenAI's error shape, else the status."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"HTTP {response.status_code}: {message}"


def _ask() -> str | None:
    try:
        return input("you: ").strip() or None
    except EOFError:
        print()
        return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
