"""What is refused is told in the words of the API that was spoken: the field that the client sent, and no other's."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tokenspeed.protocol.errors import ContextNumbers, Field, InvalidRequest
from tokenspeed.server.anthropic.errors import to_error
from tokenspeed.server.field_names import spoken_as

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 300}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "hi"}),
    "anthropic": ("/v1/messages", {**CHAT, "max_tokens": 8}),
}
NUMBERS = ContextNumbers(context_len=25, num_prompt=10, max_tokens=20)
# What one thing is called: here, elsewhere.
NAMES = [
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("stop", "stop_sequences"),
    ("logprobs", "top_logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("api", "fields", "param", "words"),
    [
        ("chat", {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        ("chat", {"max_tokens": 9999}, "max_tokens", "lower max_tokens to"),
        ("chat", {"max_completion_tokens": 9999}, "max_completion_tokens", "lower max_completion_tokens to"),
        ("chat", {"max_tokens": 9999, "max_completion_tokens": 9999}, "max_tokens", "lower max_tokens to"),
        ("chat", {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_completion_tokens 2"),
        ("chat", {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_tokens 2"),
        ("chat", {"stop": [""]}, "stop", "stop holds"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ("chat", LONG, "messages", "shorten the prompt"),
        ("completions", {"max_tokens": 9999}, "max_tokens", "lower max_tokens to"),
        ("completions", {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "above max_tokens 2"),
        ("completions", {"stop": [""]}, "stop", "stop holds"),
        ("completions", {"logprobs": 21}, "logprobs", "logprobs is 21"),
        ("completions", {"echo": True, "logprobs": 21}, "logprobs", "logprobs is 21"),
        ("completions", {"prompt": "x" * 300}, "prompt", "shorten the prompt"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ("responses", {"max_output_tokens": 9999}, "max_output_tokens", "lower max_output_tokens to"),
        ("responses", {"input": "x" * 300}, "input", "shorten the prompt"),
        ("responses", {"input": "raise in template"}, "input", "says no"),
        ("responses", {"temperature": 3}, "temperature", "temperature is 3"),
        ("responses", {"top_k": -2}, "top_k", "top_k is -2"),
        ("anthropic", {"max_tokens": 0}, None, "max_tokens is 0"),
        (
            "anthropic",
            {"max_tokens": 9999},
            None,
            "`max_tokens` exceed context limit: 10 + 9999 > 256, decrease",
        ),
        ("anthropic", {"stop_sequences": [""]}, None, "stop_sequences holds"),
        ("anthropic", {"stop_sequences": ["a"] * 65}, None, "stop_sequences holds 65"),
        ("anthropic", {"stop_sequences": ["a" * 1025]}, None, "stop_sequences holds"),
        ("anthropic", {"top_k": -2}, None, "top_k is -2"),
        ("anthropic", LONG, None, "shorten the prompt"),
    ],
)
async def test_the_field_that_was_sent(
    http: httpx.AsyncClient, api: str, fields: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    url, body = APIS[api]
    response = await http.post(url, json={**body, **fields, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error.get("param") == param and words in error["message"], error
    sent = {**body, **fields}
    for same in NAMES:
        for name in same:
            if name not in sent:
                assert not re.search(rf"\b{name}\b(?! string)", error["message"]), error


def test_words_are_no_fields_and_causes_are_kept() -> None:
    """What a message says of a field is a piece of it; its words, which may be a user's, are never read. The bug:
    `max_tokens` in a template's own complaint became another field, numbers were taken out of a sentence."""
    cause = ValueError("why")
    names = {"stop": "stop_sequences", "max_tokens": "max_output_tokens", "messages": "input", "prompt": "messages"}
    with pytest.raises(InvalidRequest) as caught, spoken_as(names):
        raise InvalidRequest(
            [Field("stop"), " holds max_tokens; lower ", Field("max_tokens"), ", not ", Field("seed")],
            "messages[3].role",
            "c",
            NUMBERS,
        ) from cause
    assert caught.value.message == "stop_sequences holds max_tokens; lower max_output_tokens, not seed"
    assert (caught.value.param, caught.value.code, caught.value.__cause__) == ("input", "c", cause)
    assert caught.value.numbers is NUMBERS
    with pytest.raises(InvalidRequest) as caught, spoken_as({"stop": "stop_sequences"}):
        raise InvalidRequest("stop is a word; nothing", "stop[0]")
    assert caught.value.message == "stop is a word; nothing"
    assert caught.value.param == "stop_sequences[0]"
    with pytest.raises(InvalidRequest) as caught, spoken_as(names):
        raise InvalidRequest("stopping", None)
    assert (caught.value.message, caught.value.param) == ("stopping", None)


def test_numbers_are_told_whatever_the_sentence_was() -> None:
    error = InvalidRequest("in other words", "max_tokens", "context_length_exceeded", NUMBERS)
    assert "10 + 20 > 25" in to_error(error, "r")[1].error.message
    plain = InvalidRequest("the context length is 25 tokens", "max_tokens", "context_length_exceeded")
    assert to_error(plain, "r")[1].error.message == "the context length is 25 tokens"


def test_a_message_in_pieces_is_cut_as_any_other() -> None:
    assert len(InvalidRequest([Field("stop"), "x" * 10_000]).message) == len(InvalidRequest("x" * 10_000).message)
