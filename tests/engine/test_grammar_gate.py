"""Requests that wait for their grammar: order, ends, and what the engine says of grammars it cannot use."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from concurrent.futures import Future

import pytest
from fake_runner import NAN_TOKEN, FakeRunner, continuation

from tokenspeed.engine import run as run_module
from tokenspeed.engine.grammar_gate import GrammarGate
from tokenspeed.engine.interface import GenerationEvent, GenerationRequest
from tokenspeed.engine.step_log import StepLog
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.protocol.errors import InvalidRequest, Overloaded
from tokenspeed.protocol.grammar import INVALID_GRAMMAR, GrammarSpec
from tokenspeed.protocol.messages import AddRequest, EngineStats, SequenceOutput
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Row, RowResult, StepPlan


class FakeCompiler:
    """Compiles when the test says so."""

    kinds = ("regex",)
    num_grammars, grammar_bytes = 2, 3000

    def __init__(self) -> None:
        self.futures: dict[str, Future] = {}
        self.is_closed = False
        self.num_warmed = 0

    def warm(self) -> None:
        self.num_warmed += 1

    def submit(self, spec: GrammarSpec) -> Future:
        return self.futures.setdefault(spec.text, Future())

    def forget(self, spec: GrammarSpec) -> None:
        self.futures[spec.text].cancel()

    def close(self) -> None:
        self.is_closed = True


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, param="regex")


def add(request_id: str, text: str, n: int = 1) -> AddRequest:
    return AddRequest(
        request_id=request_id, prompt_token_ids=[1], sampling=SamplingParams(n=n, max_tokens=3), grammar=spec(text)
    )


def ended(request_id: str, index: int = 0) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, index=index, finish_reason="stop")


def test_released_in_order_of_arrival_as_they_are_compiled():
    compiler = FakeCompiler()
    gate = GrammarGate(compiler)
    for request_id, text in (("a", "slow"), ("b", "fast"), ("c", "slow"), ("d", "fast")):
        assert gate.hold(add(request_id, text)) == []
    assert gate.release() == ([], [])
    compiler.futures["fast"].set_result(object())
    ready, outputs = gate.release()
    assert [request.request_id for request, _ in ready] == ["b", "d"]
    compiler.futures["slow"].set_result(object())
    ready, more = gate.release()
    assert [request.request_id for request, _ in ready] == ["a", "c"]
    assert outputs == more == []
    assert not gate.is_holding


def test_a_refused_grammar_ends_every_sequence_with_the_reason():
    compiler = FakeCompiler()
    gate = GrammarGate(compiler)
    gate.hold(add("a", "bad", n=2))
    gate.hold(add("b", "broken"))
    compiler.futures["bad"].set_exception(GrammarError("no such rule"))
    compiler.futures["broken"].set_exception(RuntimeError("no worker"))
    ready, outputs = gate.release()
    assert ready == []
    assert [(output.request_id, output.index, output.finish_reason) for output in outputs] == [
        ("a", 0, "error"), ("a", 1, "error"), ("b", 0, "error"),
    ]  # fmt: skip
    assert outputs[0].error == "the grammar cannot be used: no such rule"
    assert outputs[0].error_code == INVALID_GRAMMAR
    assert outputs[2].error_code is None


def test_off_is_said_at_once():
    (output,) = GrammarGate(None).hold(add("a", "x"))
    assert output.error_code == INVALID_GRAMMAR
    assert "--grammar-backend" in (output.error or "")


def test_aborts():
    compiler = FakeCompiler()
    gate = GrammarGate(compiler)
    gate.hold(add("a", "x", n=2))
    gate.hold(add("b", "x", n=2))
    assert [(output.index, output.finish_reason) for output in gate.abort("a", None)] == [(0, "abort"), (1, "abort")]
    assert gate.abort("b", 1) == []
    assert gate.abort("unknown", None) == []
    compiler.futures["x"].set_result(object())
    ((request, unwanted),) = gate.release()[0]
    assert (request.request_id, unwanted) == ("b", [1])
    gate.hold(add("c", "y", n=2))
    assert len(gate.abort_all("error", "gone")) == 2
    assert not gate.is_holding


def test_a_grammar_that_nobody_waits_for_any_more_leaves_the_queue():
    """The bug: requests that were aborted left their grammars in the queue of the workers, and a later schema waited
    14 s behind those of 24 clients that had hung up."""
    compiler = FakeCompiler()
    gate = GrammarGate(compiler)
    for request_id, text in (("a", "shared"), ("b", "shared"), ("c", "own"), ("d", "other"), ("e", "done")):
        gate.hold(add(request_id, text, n=2))
    assert gate.num_sequences == 10
    gate.abort("a", None)
    gate.abort("c", None)
    gate.abort("d", 1)
    compiler.futures["done"].set_result(object())
    gate.abort("e", None)
    cancelled = {text for text, future in compiler.futures.items() if future.cancelled()}
    assert cancelled == {"own"}, "b waits for the one of a"
    assert gate.num_sequences == 4
    gate.abort("b", None)
    assert compiler.futures["shared"].cancelled()
    gate.abort_all("error", "gone")
    assert compiler.futures["other"].cancelled() and gate.num_sequences == 0
    del compiler.futures["own"]
    gate.hold(add("f", "own"))
    compiler.futures["own"].set_result(object())
    assert [request.request_id for request, _ in gate.release()[0]] == ["f"]


def test_a_grammar_lives_until_the_last_sequence_has_ended():
    class Compiled:
        pass

    compiler = FakeCompiler()
    gate = GrammarGate(compiler)
    gate.hold(add("a", "x", n=2))
    grammar = Compiled()
    alive = weakref.ref(grammar)
    compiler.futures.pop("x").set_result(grammar)
    del grammar
    gate.release()
    gate.note([SequenceOutput(request_id="a", token_ids=[1]), ended("a", 0), ended("other")])
    gc.collect()
    assert alive() is not None
    gate.note([ended("a", 1)])
    gc.collect()
    assert alive() is None


# ---- through loop and client ----------------------------------------------------------------------------------------


class GrammarRunner(FakeRunner):
    """The fake with a compiler; it obeys no grammar."""

    compiler = FakeCompiler()

    def __init__(self, config, **arguments) -> None:
        super().__init__(config, **arguments)
        self.grammars = self.compiler


async def collect(client, request_id: str, grammar: GrammarSpec | None) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    request = GenerationRequest(request_id, [5, 6], sampling, grammar=grammar)
    return [token_id async for event in client.generate(request) for token_id in event.token_ids]


async def test_others_do_not_wait_for_a_grammar(start):
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    waiting = asyncio.create_task(collect(client, "slow", spec("slow")))
    assert await collect(client, "free", None) == continuation([5, 6], 5)
    assert not waiting.done()
    runner.compiler.futures["slow"].set_result(object())
    assert await asyncio.wait_for(waiting, 10) == continuation([5, 6], 5)
    assert await client.command("check") == (True, None)


async def test_a_bad_grammar_is_an_invalid_request(start):
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    waiting = asyncio.create_task(collect(client, "bad", spec("bad")))
    await collect(client, "free", None)
    runner.compiler.futures["bad"].set_exception(GrammarError("no such rule"))
    with pytest.raises(InvalidRequest, match="no such rule") as raised:
        await asyncio.wait_for(waiting, 10)
    assert (raised.value.param, raised.value.code) == ("regex", INVALID_GRAMMAR)


async def test_too_many_slow_grammars_are_an_overload(start):
    """No fault of the request's: it may come again."""
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    waiting = asyncio.create_task(collect(client, "slow", spec("slow")))
    await collect(client, "free", None)
    runner.compiler.futures["slow"].set_exception(Overloaded("16 such grammars wait already", 30))
    with pytest.raises(Overloaded, match="16 such grammars wait already") as raised:
        await asyncio.wait_for(waiting, 10)
    assert raised.value.retry_after_s > 0 and not raised.value.draining


async def test_without_a_compiler_the_request_is_refused(start):
    client = await start()
    with pytest.raises(InvalidRequest, match="--grammar-backend"):
        await collect(client, "a", spec("x"))


async def test_those_whose_grammar_compiles_count_as_waiting(start):
    """The bug: they were in no metric, so a server with a hundred of them looked idle."""
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    waiting = [asyncio.create_task(collect(client, name, spec("slow"))) for name in ("a", "b")]
    while client.stats is None or client.stats.num_compiling < 2:
        await asyncio.sleep(0.005)
    assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)
    runner.compiler.futures["slow"].set_result(object())
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert (client.stats.num_grammars, client.stats.grammar_bytes) == (2, 3000)
    while client.stats.num_compiling:
        await asyncio.sleep(0.005)


def test_they_are_in_the_queue_of_the_log(caplog: pytest.LogCaptureFixture):
    numbers = dict.fromkeys((f"num_pages_{what}" for what in ("total", "used", "cached")), 0)
    numbers |= dict.fromkeys(("num_preemptions", "num_prefix_hit_tokens", "num_prompt_tokens"), 0)
    stats = EngineStats(
        **numbers, num_running=1, num_waiting=2, num_generated_tokens=0, step_tokens=[], num_compiling=3
    )
    decode = StepPlan(0, [], [Row(0, 1, 1, ([],), samples=True, is_decode=True)], 1)
    with caplog.at_level(logging.INFO, "tokenspeed.engine.step_log"):
        StepLog(1).note(decode, lambda: stats)
    assert caplog.messages[0].endswith("#queue-req: 5")


async def test_a_consumer_that_leaves_while_it_compiles(start):
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    waiting = asyncio.create_task(collect(client, "gone", spec("x")))
    await collect(client, "free", None)
    while "x" not in runner.compiler.futures:  # on a busy machine the other one may be done before this one is held
        await asyncio.sleep(0.005)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    while not runner.compiler.futures["x"].cancelled():
        await asyncio.sleep(0.005)
    assert await collect(client, "next", None) == continuation([5, 6], 5)
    assert await client.command("flush_cache") == (True, None)


async def test_a_client_that_closes_ends_those_that_wait(start):
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    client = await start(build=runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    events = client.generate(GenerationRequest("a", [5], sampling, grammar=spec("never")))
    first = asyncio.ensure_future(anext(events))
    await collect(client, "free", None)
    await client.close()
    event = await asyncio.wait_for(first, 10)
    assert event.finish_reason == "error"


class FaultyRunner(GrammarRunner):
    """Constrained rows fail behind their second token: the grammar is too slow."""

    def _row(self, row: Row) -> RowResult:
        if self._slots[row.slot].grammar is not None and len(self._tokens[row.slot]) >= 4:
            return RowResult(row.slot, [], error="it is slow", error_code=INVALID_GRAMMAR)
        return super()._row(row)


async def test_an_error_of_the_grammar_is_told_from_others(start):
    """The bug: a grammar that turned out too slow ended its request with an error that looked like the engine's own."""
    compiler = FakeCompiler()
    client = await start(build=type("Runner", (FaultyRunner,), {"compiler": compiler}))
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    requests = [
        GenerationRequest("slow", [5, 6], sampling, grammar=spec("x")),
        GenerationRequest("nan", [5, NAN_TOKEN], sampling),
    ]
    tasks = [asyncio.create_task(last_of(client, request)) for request in requests]
    while "x" not in compiler.futures:
        await asyncio.sleep(0.001)
    compiler.futures["x"].set_result(object())
    slow, nan = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert (slow.finish_reason, slow.error, slow.error_code) == ("error", "it is slow", INVALID_GRAMMAR)
    assert (nan.finish_reason, nan.error_code) == ("error", None) and "NaN" in nan.error


async def last_of(client, request: GenerationRequest) -> GenerationEvent:
    return [event async for event in client.generate(request)][-1]


async def test_the_library_is_opened_when_there_is_nothing_to_do(start, monkeypatch):
    """The first constrained request on a CPU waited 5 to 8 s for the library; opened together with the server, it took
    the cores from the first requests instead."""
    runner = type("Runner", (GrammarRunner,), {"compiler": FakeCompiler()})
    monkeypatch.setattr(run_module, "WARM_IDLE_S", 1000.0)
    await collect(await start(build=runner), "free", None)
    assert runner.compiler.num_warmed == 0
    monkeypatch.setattr(run_module, "WARM_IDLE_S", 0.001)
    client = await start(build=runner)
    for _ in range(2000):
        if runner.compiler.num_warmed:
            break
        await asyncio.sleep(0.005)
    await collect(client, "free", None)
    assert runner.compiler.num_warmed == 1
