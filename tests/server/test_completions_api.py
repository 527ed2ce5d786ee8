"""POST /v1/completions over a fake engine: prompts in four spellings, echo, logprobs, several choices."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from app_client import chat, events, http_client
from fake_engine_client import BOS, EOS, IM_START, FakeClient

URL = "/v1/completions"


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def test_whole_answer(http: httpx.AsyncClient, engine: FakeClient):
    answer = (await http.post(URL, json=body("ab"))).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("hello", "stop", None)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert engine.requests[0].prompt_token_ids == [BOS, *b"ab"]
    assert engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
async def test_answers_name_their_weights(engine: FakeClient, path: str):
    """The bug: `system_fingerprint` was null in whole answers and was not in chunks."""
    asked = body("ab") if path == URL else chat()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for settings, name in (({}, "default"), ({"weight_version": 'step-"7"'}, 'step-"7"')):
        async with http_client(engine, **settings) as http:
            whole = (await http.post(path, json=asked)).json()
            chunks = events((await http.post(path, json={**asked, **options})).text)
            assert (await http.get("/get_model_info")).json()["weight_version"] == name
        assert {each["system_fingerprint"] for each in (whole, *chunks)} == {name} and chunks[-1]["choices"] == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        (["a", "b"], [[BOS, *b"a"], [BOS, *b"b"]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("<|im_start|>x", [[BOS, IM_START, *b"x"]]),
    ],
)
async def test_prompt_spellings(http: httpx.AsyncClient, engine: FakeClient, prompt: Any, expected: list[list[int]]):
    answer = (await http.post(URL, json=body(prompt))).json()
    assert [request.prompt_token_ids for request in engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * len(expected)


async def test_choices_are_numbered_by_prompt_then_sequence(engine: FakeClient, http: httpx.AsyncClient):
    engine.reply = lambda request, index: f"{bytes(request.prompt_token_ids).decode()}{index}"
    ids = [list(b"p"), list(b"q")]
    answer = (await http.post(URL, json=body(ids, n=2))).json()
    assert [choice["text"] for choice in answer["choices"]] == ["p0", "p1", "q0", "q1"]
    texts = ["", "", "", ""]
    for chunk in events((await http.post(URL, json=body(ids, n=2, stream=True))).text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["p0", "p1", "q0", "q1"]


async def test_no_special_tokens(http: httpx.AsyncClient, engine: FakeClient):
    await http.post(URL, json=body("ab", add_special_tokens=False))
    assert engine.requests[0].prompt_token_ids == list(b"ab")


async def test_logprobs(http: httpx.AsyncClient):
    answer = (await http.post(URL, json=body("ab", logprobs=2, max_tokens=2))).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["h", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}],
        "text_offset": [0, 1],
    }


async def test_logprobs_of_half_characters_stay_apart(engine: FakeClient, http: httpx.AsyncClient):
    engine.reply = "é!"
    logprobs = (await http.post(URL, json=body("ab", logprobs=0))).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<eos>"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs(http: httpx.AsyncClient, stream: bool, n: int):
    request = body("ab", echo=True, logprobs=1, max_tokens=1, n=n, stream=stream)
    response = await http.post(URL, json=request)
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in range(n)]
    if stream:
        for chunk in events(response.text):
            (new,) = chunk["choices"]
            choices[new["index"]]["text"] += new["text"]
            for name, values in (new["logprobs"] or {}).items():
                choices[new["index"]]["logprobs"].setdefault(name, []).extend(values)
    else:
        choices = response.json()["choices"]
    for choice in choices:
        assert choice["text"] == "abh"
        assert choice["logprobs"] == {
            "tokens": ["<bos>", "a", "b", "h"],
            "token_logprobs": [None, -0.5, -0.5, -0.5],
            "top_logprobs": [None, {"a": -0.5}, {"b": -0.5}, {"h": -0.5}],
            "text_offset": [0, 0, 1, 2],
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_alone_generates_nothing(http: httpx.AsyncClient, stream: bool):
    request = body([97, 98], echo=True, logprobs=0, max_tokens=0, stream=stream, stream_options=None)
    if stream:
        request["stream_options"] = {"include_usage": True}
    response = await http.post(URL, json=request)
    if stream:
        first, finish, usage = events(response.text)
        assert first["choices"][0]["text"] == "ab" and finish["choices"][0]["text"] == ""
        logprobs, usage_counts = first["choices"][0]["logprobs"], usage["usage"]
        assert finish["choices"][0]["finish_reason"] == "length"
    else:
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("ab", "length", None)
        logprobs, usage_counts = choice["logprobs"], response.json()["usage"]
    assert logprobs["tokens"] == ["a", "b"] and logprobs["token_logprobs"] == [None, -0.5]
    assert usage_counts["completion_tokens"] == 0 and usage_counts["prompt_tokens"] == 2


async def test_prompt_logprobs_and_echo_may_want_different_counts(http: httpx.AsyncClient, engine: FakeClient):
    answer = (await http.post(URL, json=body("ab", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1))).json()
    (choice,) = answer["choices"]
    assert engine.requests[0].sampling.prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 3 and len(choice["logprobs"]["top_logprobs"][1]) == 1


async def test_token_ids(http: httpx.AsyncClient):
    (choice,) = (await http.post(URL, json=body([1, 2], return_token_ids=True))).json()["choices"]
    assert choice["token_ids"] == [*b"hello", EOS] and choice["prompt_token_ids"] == [1, 2]
    chunks = events((await http.post(URL, json=body([1, 2], return_token_ids=True, stream=True))).text)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [1, 2]
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])] == [*b"hello", EOS]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": [[]]}, "prompt[0]", "non-empty"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"prompt": [1.5]}, "prompt", "must be a string"),
        ({"prompt": [2**40]}, "prompt", "2**31"),
        ({"prompt": [-1]}, "prompt", "outside"),
        ({"prompt": [500]}, "prompt", "token id 500"),
        ({"prompt": None}, "prompt", "expected"),
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": ["a"] * 9, "n": 114}, "n", "1026 sequences, the limit is 1024"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty", "0.01"),
        ({"suffix": "x"}, "suffix", "not built yet"),
        ({"best_of": 2}, "best_of", "must equal n"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "expected int"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "above"),
        ({"messages": []}, "messages", "unknown field"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "streamed"),
    ],
)
async def test_refused_by_name(http: httpx.AsyncClient, fields: Any, param: str, words: str):
    response = await http.post(URL, json={**body("ab"), **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param.split("[")[0] and words in error["message"]


async def test_prompt_is_required(http: httpx.AsyncClient):
    error = (await http.post(URL, json={"model": "tiny"})).json()["error"]
    assert error["param"] == "prompt" and error["code"] == "missing_field"


async def test_best_of_equal_to_n_and_empty_suffix(http: httpx.AsyncClient):
    assert (await http.post(URL, json=body("ab", best_of=2, n=2, suffix=""))).status_code == 200


async def test_one_bad_prompt_of_several_fails_the_request(http: httpx.AsyncClient, engine: FakeClient):
    response = await http.post(URL, json=body([[1], [500], [2]]))
    assert response.status_code == 400 and not engine.running
    response = await http.post(URL, json=body(["a", "x" * 400], stream=True))
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert not engine.running
