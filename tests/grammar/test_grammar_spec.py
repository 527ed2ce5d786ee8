"""Constraints in a user's words: refused by name where they are malformed, and what the offline API makes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tokenspeed import LLM, SamplingParams
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.grammar.spec import KINDS, make_spec, one_of, pick
from tokenspeed.protocol.errors import InvalidRequest

GREEDY = SamplingParams(max_tokens=60, temperature=0.0)

AWKWARD: list[Any] = [
    None, 1, True, "", "[", "(?=a)", [], [1], {}, "{}", "9" * 5000, '{"a": NaN}', '{"minimum": Infinity}',
    {"format": 1}, {"format": {"type": "json_schema", "json_schema": {"not": {}}}}, {"structures": 1},
    {"structures": [1], "triggers": 1}, {"format": {"type": "regex", "pattern": "(a"}}, {"minimum": 10**400},
    "[" * 900 + "]" * 900, "\ud800", ["\ud800"], {"enum": ["\ud800"]}, {"pattern": "\ud800"},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_sent_is_taken_or_refused_by_name(kind: str) -> None:
    for value in AWKWARD:
        try:
            make_spec(kind, value, "field").text.encode()
        except InvalidRequest as error:
            assert error.param == "field"


def test_a_deep_structural_tag_is_refused() -> None:
    """It ended in a RecursionError, which was answered 500."""
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        make_spec("structural_tag", '{"format":' + "[" * 600 + "]" * 600 + "}", "tag")


@pytest.mark.parametrize("value", ['{"enum": [NaN]}', {"const": float("nan")}, {"enum": [float("-inf")]}])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    """Python reads and writes NaN as JSON; no output would ever be valid."""
    with pytest.raises(InvalidRequest):
        make_spec("json", value, "field")


def test_one_at_most() -> None:
    assert pick(one_of({}, "o")) is None
    assert pick(one_of({"json": None, "json_object": False}, "o")) is None
    with pytest.raises(InvalidRequest, match=r"o\.json and o\.regex both"):
        pick(one_of({"json": {}, "regex": "a"}, "o"))
    with pytest.raises(InvalidRequest, match=r"o\.xml cannot be used; there are json, regex"):
        one_of({"xml": 1}, "o")


@pytest.mark.timeout(300)
def test_the_offline_api_obeys(default_checkpoint: Checkpoint) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    with LLM(max_num_seqs=4, max_model_len=256, max_total_tokens=1024, device="cpu", seed=1) as llm:
        for result in llm.generate(["Once", "A number:"], GREEDY, structured_outputs={"json": schema}):
            assert json.loads(result.outputs[0].text)["n"] <= 99
        chat = [{"role": "user", "content": "Yes or no?"}]
        assert llm.chat(chat, GREEDY, structured_outputs={"choice": ["yes", "no"]})[0].outputs[0].text in ("yes", "no")
        pattern = llm.generate("Code:", GREEDY, structured_outputs={"regex": "[A-Z]{3}-[0-9]{2}"})[0].outputs[0].text
        assert re.fullmatch("[A-Z]{3}-[0-9]{2}", pattern)
        with pytest.raises(InvalidRequest, match="multipleOf"):
            llm.generate("x", GREEDY, structured_outputs={"json": {"multipleOf": 3}})
        with pytest.raises(InvalidRequest, match="not defined"):
            llm.generate(["x", "y"], GREEDY, structured_outputs={"grammar": "root ::= nothing"})
        assert llm.generate("x", GREEDY)[0].outputs[0].finish_reason in ("stop", "length")
