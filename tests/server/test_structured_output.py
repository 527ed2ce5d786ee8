"""Structured output over HTTP: every spelling, the official client, and grammars that mean harm."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_real_server import MESSAGES, Server, started

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.server.openai.constraint import ConstraintFields, constraint_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"minimum": 3}}, "end": "</n>"}


# ---- fields to a grammar --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object", "additionalProperties": {}}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"minimum": 3}}}},
         "json_schema", '{"type": "number", "minimum": 3}'),
        ({"json_schema": '{"minimum": 3}'}, "json_schema", '{"type": "number", "minimum": 3}'),
        ({"guided_json": {"minimum": 3}}, "json_schema", '{"type": "number", "minimum": 3}'),
        ({"structured_outputs": {"json": {"minimum": 3}}}, "json_schema", '{"type": "number", "minimum": 3}'),
        ({"structured_outputs": {"json_object": True}},
         "json_schema", '{"type": "object", "additionalProperties": {}}'),
        ({"regex": "^a+$"}, "regex", "a+"), ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ["a.b", "c"]}, "regex", "a\\.b|c"),
        ({"structured_outputs": {"choice": ["x"]}}, "regex", "x"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)  # fmt: skip
def test_every_spelling(fields: dict[str, Any], kind: str, text: str):
    spec = constraint_of(ConstraintFields(**fields), starts_after=(7,))
    assert spec is not None
    assert (spec.kind, spec.text, spec.starts_after) == (kind, text, (7,))
    assert spec.param.split(".")[0] in fields


def test_structural_tags_are_checked_inside():
    new = constraint_of(ConstraintFields(response_format={"type": "structural_tag", "format": {"type": "tag", **TAG}}))
    old = constraint_of(
        ConstraintFields(
            structural_tag={
                "structures": [{"begin": "<n>", "schema": {"minimum": 3}, "end": "</n>"}],
                "triggers": ["<"],
            }
        )
    )
    assert new is not None and old is not None
    assert json.loads(new.text)["format"]["content"]["json_schema"] == {"type": "number", "minimum": 3}
    (tag,) = json.loads(old.text)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "number", "minimum": 3}
    bad = {"type": "tag", **TAG, "content": {"type": "json_schema", "json_schema": {"not": {"type": "null"}}}}
    with pytest.raises(InvalidRequest, match="keyword not"):
        constraint_of(ConstraintFields(structural_tag={"format": bad}))


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "send one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "send one"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark", "grammar"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"ebnf": " "}, "ebnf", "empty"),
        ({"ebnf": "x" * 70_000}, "ebnf", "limit"),
        ({"regex": "((a{1,100}){1,100}){1,100}"}, "regex", "1000000 times"),
        ({"structural_tag": {"structures": [{}], "triggers": []}}, "structural_tag", "begin"),
    ],
)
def test_what_is_refused_at_once(fields: dict[str, Any], param: str, why: str):
    with pytest.raises(InvalidRequest) as raised:
        constraint_of(ConstraintFields(**fields))
    assert raised.value.param == param
    assert why in raised.value.message


def test_text_is_no_constraint():
    assert constraint_of(ConstraintFields(response_format={"type": "text"}, structured_outputs={})) is None


# ---- a real server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_checkpoint: Checkpoint) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("structured"), "--grammar-compile-timeout-secs", "4") as running:
        yield running


@pytest.mark.timeout(300)
def test_openai_client(server: Server):
    request: dict[str, Any] = {"model": "smol", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    whole = server.openai.chat.completions.create(**request, response_format=format_)
    person = json.loads(whole.choices[0].message.content or "")
    assert person["name"] is not None and person["age"] <= 150
    assert whole.choices[0].finish_reason == "stop"
    chunks = server.openai.chat.completions.create(**request, response_format=format_, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    choice = server.openai.chat.completions.create(**request, extra_body={"guided_choice": ["red", "blue"]})
    assert choice.choices[0].message.content in ("red", "blue")
    plain = server.openai.completions.create(
        model="smol", prompt="The number is ", max_tokens=10, extra_body={"regex": "[0-9]{4}"}
    )
    assert re.fullmatch("[0-9]{4}", plain.choices[0].text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_a_400(server: Server, stream: bool):
    with pytest.raises(openai.BadRequestError) as raised:
        server.openai.chat.completions.create(
            model="smol", messages=MESSAGES, stream=stream, extra_body={"ebnf": "root ::= missing"}
        )
    assert raised.value.param == "ebnf"
    assert raised.value.code == "invalid_grammar"
    with pytest.raises(openai.BadRequestError, match="keyword multipleOf"):
        server.openai.chat.completions.create(
            model="smol", messages=MESSAGES, stream=stream, extra_body={"guided_json": {"multipleOf": 3}}
        )


@pytest.mark.timeout(300)
def test_bombs_do_not_stall_the_server(server: Server):
    """Both workers are busy with grammars that never end; the others go on, and so do grammars known before."""
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "regex": "[ab]{2}"})
    bombs = [".?" * 1500, "(a?b?c?d?){0,900}" + ".?" * 800]
    statuses: list[int] = []

    def explode(pattern: str) -> None:
        answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "regex": pattern})
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=explode, args=(bomb,)) for bomb in bombs]
    for thread in threads:
        thread.start()
    num_answers = 0
    while any(thread.is_alive() for thread in threads):
        body = {"prompt": "x", "max_tokens": 2, "regex": "[ab]{2}" if num_answers % 2 else None}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        num_answers += 1
        time.sleep(0.05)
    assert statuses == [400, 400]
    assert num_answers >= 4
    assert server.http.post("/debug/check").status_code == 200
