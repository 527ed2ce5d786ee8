"""The embedded model under constraints, through the real engine: what comes out is valid, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.args import EngineArgs
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.connect import start_local_engine
from tokenspeed.engine.interface import GenerationRequest
from tokenspeed.engine.llm import configure
from tokenspeed.grammar.json_schema import rewrite_schema
from tokenspeed.grammar.tools import tool_choice_schema
from tokenspeed.protocol.errors import InvalidRequest
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams, ThinkingBudget
from tokenspeed.runner.build import build_runner

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

INT, STR = {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "string", "maxLength": 8}

# Small values, so that max_tokens is enough for each.
SCHEMAS: dict[str, Any] = {
    "string": STR,
    "integer": INT,
    "number": {"type": "number", "minimum": -1, "maximum": 1.5},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", 7, None, {"a": [1, 2]}]},
    "const": {"const": {"name": "Zoë", "n": 1}},
    "minLength": {"type": "string", "minLength": 4, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "pattern in the middle": {"type": "string", "pattern": "[xy]{3}"},
    "date": {"type": "string", "format": "date"},
    "object": {"type": "object", "properties": {"a": STR, "b": INT}, "required": ["a", "b"]},
    "optional": {"type": "object", "properties": {"a": INT, "b": INT, "c": INT}, "required": ["c"]},
    "closed": {"type": "object", "properties": {"a": INT}, "required": ["a"], "additionalProperties": False},
    "additionalProperties": {
        "type": "object", "additionalProperties": {"type": "boolean"}, "propertyNames": {"maxLength": 6},
        "minProperties": 1, "maxProperties": 2,
    },
    "nested": {
        "type": "object", "required": ["p"],
        "properties": {"p": {"type": "object", "properties": {"x": INT, "y": INT}, "required": ["x", "y"]}},
    },
    "required without property": {"type": "object", "required": ["q"], "additionalProperties": INT, "maxProperties": 1},
    "array": {"type": "array", "items": INT, "minItems": 2, "maxItems": 3},
    "no items": {"type": "array", "maxItems": 0},
    "prefixItems": {"type": "array", "prefixItems": [INT, {"type": "boolean"}], "items": False},
    "anyOf": {"anyOf": [INT, {"type": "boolean"}]},
    "oneOf": {"oneOf": [
        {"type": "object", "properties": {"k": {"const": "a"}, "x": INT}, "required": ["k", "x"]},
        {"type": "object", "properties": {"k": {"const": "b"}, "y": STR}, "required": ["k", "y"]},
    ]},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]},
                        {"properties": {"b": INT}, "required": ["b"]}]},
    "$ref": {"$defs": {"n": INT}, "type": "object", "properties": {"v": {"$ref": "#/$defs/n"}}, "required": ["v"]},
    "recursive": {
        "$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [
            {"type": "null"}, {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}]}},
            "required": ["v", "next"]}},
        "$ref": "#/$defs/n",
    },
    "array of objects": {
        "type": "array", "minItems": 1, "maxItems": 2,
        "items": {"type": "object", "properties": {"id": INT}, "required": ["id"]},
    },
}  # fmt: skip


@dataclass
class Done:
    """One request's end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A client with short words for a test."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self.client = client
        self._count = 0

    async def run(self, prompt: str, grammar: GrammarSpec | None, **sampling: Any) -> Done:
        self._count += 1
        ids = self.client.render_chat([{"role": "user", "content": prompt}])
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 120, **sampling})
        done = Done()
        async for event in self.client.generate(GenerationRequest(f"r{self._count}", ids, params, grammar=grammar)):
            done.text += event.text
            done.token_ids += event.token_ids
            done.finish_reason = event.finish_reason
            assert event.error is None
        return done

    async def all(self, jobs: Sequence[tuple[str, GrammarSpec | None, dict[str, Any]]]) -> list[Done]:
        return await asyncio.gather(*(self.run(prompt, grammar, **sampling) for prompt, grammar, sampling in jobs))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(default_checkpoint: Checkpoint) -> AsyncIterator[Engine]:
    # 1216 tokens: a batch of constrained requests does not fit, so some are preempted or wait.
    config = configure(EngineArgs(seed=1, max_total_tokens=1216, max_num_seqs=12, device="cpu"))
    client = await start_local_engine(config, build_runner)
    yield Engine(client)
    await client.close()


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(rewrite_schema(value, "x")))


@pytest.mark.parametrize("seed", [None, 11])
async def test_every_schema_is_obeyed(engine: Engine, seed: int | None):
    sampling: dict[str, Any] = {} if seed is None else {"temperature": 1.3, "seed": seed}
    jobs = [(f"Give me an example of {name} as JSON.", schema(value), sampling) for name, value in SCHEMAS.items()]
    for (name, value), done in zip(SCHEMAS.items(), await engine.all(jobs), strict=True):
        assert done.finish_reason == "stop", (name, done.text)
        instance = json.loads(done.text)
        checker = jsonschema.Draft202012Validator(value, format_checker=jsonschema.FormatChecker(["date", "ipv4"]))
        checker.validate(instance)
    assert await engine.client.command("check") == (True, None)


@pytest.mark.parametrize(
    ("kind", "text", "whole"),
    [
        ("regex", "(yes|no|maybe)", "yes|no|maybe"),
        ("regex", r"\d{3}-\d{4}", r"\d{3}-\d{4}"),
        ("ebnf", 'root ::= "SELECT " col " FROM t" \ncol ::= "a" | "b" | "*"', r"SELECT (a|b|\*) FROM t"),
    ],
)
async def test_regular_expressions_and_grammars(engine: Engine, kind: Any, text: str, whole: str):
    grammar = GrammarSpec(kind=kind, text=text)
    jobs = [("Say something.", grammar, {"temperature": 1.5, "seed": seed}) for seed in range(4)]
    for done in await engine.all(jobs):
        assert re.fullmatch(whole, done.text), done.text
        assert done.finish_reason == "stop"


async def test_strangers_change_nothing(engine: Engine):
    """Greedy tokens of free requests beside constrained ones, and the other way round, are those of each alone."""
    object_ = schema(SCHEMAS["object"])
    jobs: list[tuple[str, GrammarSpec | None, dict[str, Any]]] = [
        ("Tell me about Paris.", None, {"max_tokens": 40}),
        ("Describe a person in JSON.", object_, {}),
        ("Count to ten.", None, {"max_tokens": 40, "temperature": 1.0, "seed": 5}),
        ("Describe a person in JSON.", object_, {"temperature": 1.0, "seed": 9}),
        ("Pick one.", GrammarSpec(kind="regex", text="(left|right)"), {}),
    ]
    alone = [await engine.run(prompt, grammar, **sampling) for prompt, grammar, sampling in jobs]
    assert await engine.all(jobs) == alone


async def test_preempted_requests_go_on(engine: Engine):
    """Twelve that need 140 tokens each in a pool of 1216: the youngest give way and are computed again, and go on in
    the middle of a word of their grammar. (Their tokens may differ from a run alone: a recomputed prompt takes other
    kernels on this model; tests/laws has the equality.)"""
    words = "[a-z]{4}( [a-z]{4}){70}"
    await engine.client.command("stats")
    before = engine.client.stats
    assert before is not None
    jobs = [
        (f"Write words of four letters, list {place}.", GrammarSpec(kind="regex", text=words)) for place in range(12)
    ]
    many = await engine.all([(prompt, grammar, {"max_tokens": 140}) for prompt, grammar in jobs])
    await engine.client.command("stats")
    after = engine.client.stats
    assert after is not None
    assert after.num_preemptions > before.num_preemptions
    for done in many:
        cut = re.fullmatch("([a-z]{4} ){10,}[a-z]{0,4}", done.text)  # by max_tokens
        assert cut or re.fullmatch(words, done.text), done.text
    assert await engine.client.command("check") == (True, None)


async def test_the_end_with_ignore_eos_and_min_tokens(engine: Engine):
    """A finished grammar leaves only the end, which is no text: the output stays what the grammar says."""
    yes = GrammarSpec(kind="regex", text="(yes|no)")
    ignoring, least = await engine.all(
        [("Well?", yes, {"ignore_eos": True, "max_tokens": 9}), ("Well?", yes, {"min_tokens": 6, "max_tokens": 12})]
    )
    assert ignoring.text in ("yes", "no")
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 9)
    assert least.text in ("yes", "no")
    assert least.finish_reason == "stop"
    assert len(least.token_ids) >= 6


async def test_the_constraint_starts_behind_the_reasoning(engine: Engine):
    marker = tuple(engine.client.tokenizer.encode("END", add_special_tokens=False))
    grammar = GrammarSpec(kind="regex", text=" ?(yes|no)", starts_after=marker)
    bias = {token_id: 100.0 for token_id in marker}
    free = await engine.run("Think.", grammar, max_tokens=8)
    assert free == await engine.run("Think.", None, max_tokens=8)
    assert len(marker) == 1, "the marker that the bias below forces"
    forced = await engine.run("Think.", grammar, logit_bias=bias)
    assert re.fullmatch("END ?(yes|no)", forced.text)
    assert forced.finish_reason == "stop"


async def test_an_output_cannot_end_inside_its_reasoning(engine: Engine):
    """The bug: a model that ended before the marker answered `stop`, and what it had said obeyed no grammar."""
    marker = tuple(engine.client.tokenizer.encode("END", add_special_tokens=False))
    grammar = GrammarSpec(kind="regex", text=" ?(yes|no)", starts_after=marker)
    bias = {token_id: 100.0 for token_id in engine.client.model_config.eos_token_ids}
    assert (await engine.run("Think.", None, logit_bias=bias, max_tokens=6)).finish_reason == "stop"
    held = await engine.run("Think.", grammar, logit_bias=bias, max_tokens=6)
    assert (held.finish_reason, len(held.token_ids)) == ("length", 6)


async def test_reasoning_ends_with_its_budget(engine: Engine):
    """The bug: `thinking.budget_tokens` was taken and did nothing."""
    closing = tuple(engine.client.tokenizer.encode("\nTHE END", add_special_tokens=False))
    budget = ThinkingBudget(num_tokens=5, ends=closing[-2:], closing=closing)
    grammar = GrammarSpec(kind="regex", text=" ?(yes|no)", starts_after=closing[-2:])
    plain = await engine.run("Think.", None, max_tokens=30)
    alone = await engine.run("Think.", None, thinking=budget, max_tokens=30)
    bound = await engine.run("Think.", grammar, thinking=budget)
    for done in (alone, bound):
        assert done.token_ids[:5] == plain.token_ids[:5] and tuple(done.token_ids[5 : 5 + len(closing)]) == closing
    assert re.search("THE END ?(yes|no)$", bound.text) and bound.finish_reason == "stop"


async def test_n_sequences_have_a_matcher_each(engine: Engine):
    ids = engine.client.render_chat([{"role": "user", "content": "Number?"}])
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=20)
    grammar = GrammarSpec(kind="regex", text="[0-9]{3}[a-c]")
    texts = ["", "", "", ""]
    async for event in engine.client.generate(GenerationRequest("many", ids, params, grammar=grammar)):
        texts[event.index] += event.text
    assert all(re.fullmatch("[0-9]{3}[a-c]", text) for text in texts)
    assert len(set(texts)) > 1


async def test_abort_and_bad_grammars_leave_nothing_behind(engine: Engine):
    task = asyncio.create_task(
        engine.run("Write.", GrammarSpec(kind="regex", text="[a-z ]{500,}"), max_tokens=600, ignore_eos=True)
    )
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(InvalidRequest, match="cannot be used") as raised:
        await engine.run("x", GrammarSpec(kind="ebnf", text="root ::= missing", param="ebnf"))
    assert raised.value.param == "ebnf"
    assert await engine.client.command("flush_cache") == (True, None)


async def test_forced_tool_calls(engine: Engine):
    def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    point = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"], "$defs": {"n": INT}}
    tools = [tool("move-to", point), tool("stop.now", {"type": "object", "properties": {}})]
    any_, one = await engine.all(
        [
            ("Move to 7.", tool_choice_schema(tools, None, parallel=False), {}),
            ("Move to 7.", tool_choice_schema(tools, "move-to", parallel=True), {"temperature": 1.0, "seed": 1}),
        ]
    )
    (call,) = json.loads(any_.text)
    assert call["name"] in ("move-to", "stop.now")
    (call,) = json.loads(one.text)
    assert call["name"] == "move-to"
    jsonschema.validate(call["parameters"], point)
    with pytest.raises(InvalidRequest, match=r"'fly', which is not among tools: 'move-to', 'stop.now'"):
        tool_choice_schema(tools, "fly", parallel=True)
