"""The client over an engine on a thread: text, stop strings, endings, overload, drain."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import aclosing

import pytest
from fake_runner import NAN_TOKEN, TEMPLATE, VOCAB, ByteTokenizer, FakeRunner, continuation, engine_config

from tokenspeed.engine.admission import Gate
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.interface import GenerationEvent, GenerationRequest
from tokenspeed.engine.launch import EngineThread, wait_ready
from tokenspeed.protocol.errors import EngineDead, InvalidRequest, Overloaded
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams


def request(prompt: list[int], max_tokens: int | None = 8, name: str = "r", **fields) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields))


def said(prompt: list[int], count: int) -> str:
    return bytes(continuation(prompt, count)).decode()


class Heard:
    """Every event of a request, by sequence."""

    def __init__(self, num_sequences: int) -> None:
        self.events: list[list[GenerationEvent]] = [[] for _ in range(num_sequences)]

    def text(self, index: int = 0) -> str:
        return "".join(event.text for event in self.events[index])

    def ids(self, index: int = 0) -> list[int]:
        return [token_id for event in self.events[index] for token_id in event.token_ids]

    def last(self, index: int = 0) -> GenerationEvent:
        return self.events[index][-1]

    def assert_ended_once(self) -> None:
        for events in self.events:
            assert [event.finish_reason is not None for event in events].count(True) == 1
            assert events[-1].finish_reason is not None


async def listen(client: AsyncEngineClient, wanted: GenerationRequest) -> Heard:
    heard = Heard(wanted.sampling.n)
    async for event in client.generate(wanted):
        heard.events[event.index].append(event)
    heard.assert_ended_once()
    return heard


async def idle(client: AsyncEngineClient) -> None:
    """Wait until the engine runs nothing, then prove that it holds nothing."""
    for _ in range(2000):
        assert (await client.command("stats"))[0]
        stats = client.stats
        if stats is not None and not stats.num_running + stats.num_waiting:
            break
        await asyncio.sleep(0.005)
    assert await client.command("check") == (True, None)
    assert client.stats is not None and client.stats.num_pages_used == 0


async def test_text_ids_and_counts(start) -> None:
    client = await start()
    heard = await listen(client, request([5, 6, 7], 12))
    assert heard.ids() == continuation([5, 6, 7], 12) and heard.text() == said([5, 6, 7], 12)
    last = heard.last()
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens) == (3, 0, 12)
    again = await listen(client, request([5] * 9, 2))
    assert again.last().num_cached_tokens == 0
    assert (await listen(client, request([5] * 9, 2))).last().num_cached_tokens == 8


async def test_max_tokens_none_fills_the_context(start) -> None:
    client = await start(engine_config(max_model_len=20))
    heard = await listen(client, request([1, 2], None))
    assert len(heard.ids()) == 18 and heard.last().finish_reason == "length"


async def test_sequences_of_one_prompt(start) -> None:
    client = await start()
    heard = await listen(client, request([1] * 10, 15, n=5))
    assert [heard.text(index) for index in range(5)] == [said([1] * 10, 15)] * 5


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_tokens_ends_and_frees(start, include: bool) -> None:
    client = await start()
    text = said([3], 40)
    stop = text[10:14]
    assert text.find(stop) == 10
    heard = await listen(client, request([3], 40, stop=(stop, "zzzzzz"), include_stop_str_in_output=include))
    assert heard.text() == text[: 14 if include else 10]
    assert heard.ids() == continuation([3], 14) and heard.last().num_output_tokens == 14
    assert (heard.last().finish_reason, heard.last().stop_reason) == ("stop", stop)
    await idle(client)


async def test_stop_string_ends_only_its_sequence(start) -> None:
    """All sequences say the same here, so each must be ended on its own account, and none twice."""
    client = await start()
    stop = said([4], 30)[7:12]
    heard = await listen(client, request([4], 30, n=4, stop=(stop,)))
    assert [heard.text(index) for index in range(4)] == [said([4], 7)] * 4
    await idle(client)


async def test_text_is_held_back_while_a_stop_string_may_come(start) -> None:
    client = await start()
    text = said([8], 20)
    heard = await listen(client, request([8], 20, stop=(text[5:9] + "\0",)))
    assert heard.text() == text and heard.last().finish_reason == "length"
    shown = ""
    for event in heard.events[0][:-1]:
        shown += event.text
        assert not shown.endswith(text[5:9]), "this much may still be taken back"


async def test_min_tokens_delays_stop_strings(start) -> None:
    client = await start()
    text = said([3], 40)
    heard = await listen(client, request([3], 40, stop=(text[2],), min_tokens=9))
    assert heard.text() == text[: text.index(text[2], 8)]


async def test_stop_token_is_no_text_unless_asked(start) -> None:
    client = await start()
    stop = continuation([2], 9)[8]
    count = continuation([2], 9).index(stop) + 1
    plain = await listen(client, request([2], 20, stop_token_ids=(stop,)))
    assert plain.text() == said([2], count - 1) and plain.ids() == continuation([2], count)
    assert (plain.last().finish_reason, plain.last().stop_reason) == ("stop", stop)
    assert plain.last().num_output_tokens == count
    kept = await listen(client, request([2], 20, stop_token_ids=(stop,), include_stop_str_in_output=True))
    assert kept.text() == said([2], count)


async def test_logprobs_have_text(start) -> None:
    client = await start()
    heard = await listen(client, request([65, 66, 200, 67], 3, logprobs=2, prompt_logprobs=0))
    entries = [entry for event in heard.events[0] for entry in event.logprobs]
    assert [entry.token for entry in entries] == list(said([65, 66, 200, 67], 3))
    assert [(top.token, top.rank) for top in entries[0].top] == [("d", 1), ("e", 2)]
    prompt = heard.events[0][0].prompt_logprobs
    assert [(entry.token, entry.token_bytes) for entry in prompt] == [("B", b"B"), ("�", b"\xc8"), ("C", b"C")]


async def test_render_chat_goes_through_the_template(start) -> None:
    client = await start()
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ok"}]
    assert bytes(client.render_chat(messages)).decode() == "user:hé\nassistant:ok\n"
    with pytest.raises(InvalidRequest):
        client.render_chat([{"content": "nobody said it"}])


@pytest.mark.parametrize(
    ("wanted", "param", "code", "words"),
    [
        (request([]), "prompt", None, "empty"),
        (request([1, VOCAB]), "prompt", None, f"token id {VOCAB}"),
        (request([1, -1]), "prompt", None, "token id -1"),
        (request([1] * 128, None), "prompt", "context_length_exceeded", "128 tokens"),
        (request([1] * 100, 29), "max_tokens", "context_length_exceeded", "at most 28"),
        (request([1] * 100, None, min_tokens=29), "min_tokens", "context_length_exceeded", "leaves 28"),
        (request([1], logit_bias={VOCAB: 1.0}), "logit_bias", None, f"token id {VOCAB}"),
        (request([1], stop_token_ids=(7, 2**70)), "stop_token_ids", None, "token id 1180591620717411303424"),
    ],
)
async def test_refusals_before_the_engine(start, wanted, param, code, words) -> None:
    client = await start()
    with pytest.raises(InvalidRequest) as refused:
        await listen(client, wanted)
    assert (refused.value.param, refused.value.code) == (param, code) and words in refused.value.message
    assert (await listen(client, request([1], 1))).last().finish_reason == "length"


async def test_numbers_beyond_the_wire_do_not_kill(start) -> None:
    client = await start()
    assert (await listen(client, request([1], 2, top_k=2**90))).last().finish_reason == "length"


async def test_a_poisoned_request_fails_alone(start) -> None:
    client = await start()
    bad, good = await asyncio.gather(listen(client, request([NAN_TOKEN], 9)), listen(client, request([7], 9)))
    assert bad.last().finish_reason == "error" and "NaN" in (bad.last().error or "")
    assert good.text() == said([7], 9)
    await idle(client)


async def test_a_detokenizer_failure_fails_alone(start) -> None:
    class Fragile(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == broken:
                raise KeyError("no such token")
            return super().token_bytes(token_id)

    broken = continuation([7], 9)[4]
    client = await start(tokenizer=Fragile())
    innocent = next(prompt for prompt in ([n] for n in range(8, 99)) if broken not in continuation(prompt, 9))
    bad, good = await asyncio.gather(listen(client, request([7], 9)), listen(client, request(innocent, 9)))
    assert bad.last().finish_reason == "error" and "no such token" in (bad.last().error or "")
    assert good.text() == said(innocent, 9)
    await idle(client)


async def test_abort_by_id(start) -> None:
    gate = threading.Event()
    client = await start(build=lambda config: FakeRunner(config, before_step=lambda step: step < 4 or gate.wait(10)))
    heard = asyncio.create_task(listen(client, request([1], 100, name="mine", n=2)))
    await asyncio.sleep(0.05)
    client.abort("mine")
    client.abort("nobody")
    gate.set()
    assert [(await heard).last(index).finish_reason for index in range(2)] == ["abort", "abort"]


async def test_leaving_early_frees_the_engine(start) -> None:
    client = await start(build=lambda config: FakeRunner(config, step_s=0.002))
    async with aclosing(client.generate(request([1] * 9, 110, n=3))) as events:
        async for _ in events:
            break
    await idle(client)


async def test_disconnects_at_random_points(start) -> None:
    """Consumers leave before, between and after events; the engine ends up empty and the others hear everything."""
    client = await start(engine_config(num_pages=40), build=lambda config: FakeRunner(config, step_s=0.0005))
    rng = random.Random(5)

    async def visit(number: int) -> None:
        prompt = [number % 250] * rng.randint(1, 30)
        wanted = request(prompt, rng.randint(1, 60), name="same-name", n=rng.choice([1, 1, 3]))
        match rng.randrange(3):
            case 0:
                heard = await listen(client, wanted)
                assert heard.text() == said(prompt, wanted.sampling.max_tokens or 0)
            case 1:
                task = asyncio.create_task(listen(client, wanted))
                await asyncio.sleep(rng.random() * 0.03)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            case 2:
                left = rng.randint(1, 10)
                async with aclosing(client.generate(wanted)) as events:
                    async for _ in events:
                        left -= 1
                        if not left:
                            break

    await asyncio.gather(*(visit(number) for number in range(60)))
    await idle(client)


async def test_a_slow_consumer_gets_merged_events(start) -> None:
    client = await start()
    events = client.generate(request([6], 100))
    first = await anext(events)
    await idle(client)
    rest = [event async for event in events]
    assert len(rest) <= 2
    assert [*first.token_ids, *(token_id for event in rest for token_id in event.token_ids)] == continuation([6], 100)
    assert first.text + "".join(event.text for event in rest) == said([6], 100)
    last = [first, *rest][-1]  # on a busy machine the first event may hold everything
    assert last.finish_reason == "length" and last.num_output_tokens == 100


@pytest.mark.parametrize("failing_step", [0, 1, 3, 8, 20])
@pytest.mark.parametrize("overlap", [True, False])
async def test_engine_death_ends_every_sequence_once(start, failing_step: int, overlap: bool) -> None:
    def fail(step_id: int) -> None:
        if step_id == failing_step:
            raise RuntimeError("power cut")

    client = await start(engine_config(overlap=overlap), lambda config: FakeRunner(config, before_step=fail))
    wanted = [request([number + 1] * 12, 60, name=f"r{number}", n=1 + number % 3) for number in range(7)]
    results = await asyncio.gather(*(listen(client, one) for one in wanted), return_exceptions=True)
    for result in results:
        if isinstance(result, Heard):
            for index in range(len(result.events)):
                assert result.last(index).finish_reason == "error" and "power cut" in (result.last(index).error or "")
        else:
            assert isinstance(result, EngineDead) and "power cut" in str(result)
    for _ in range(500):
        if not client.is_alive:
            break
        await asyncio.sleep(0.01)
    assert not client.is_alive
    with pytest.raises(EngineDead):
        await listen(client, request([1]))
    ok, error = await client.command("ping")
    assert not ok and "power cut" in (error or "")


def test_retry_after_is_when_a_place_gets_free() -> None:
    """It was the time in which the whole queue would empty, up to 60 s, where a place is free in one or two."""
    for num_seqs, duration_s, expected in ((64, 30.0, 1), (4, 8.0, 2), (1, 600.0, 10)):
        gate = Gate(8, num_seqs)
        for _ in range(200):
            gate.admit(0)
            gate.ended(1, False, duration_s)
        with pytest.raises(Overloaded) as raised:
            for _ in range(num_seqs + 9):
                gate.admit(0)
        assert raised.value.retry_after_s == expected


async def test_the_queue_is_bounded(start) -> None:
    gate = threading.Event()
    client = await start(
        engine_config(max_num_seqs=2),
        lambda config: FakeRunner(config, before_step=lambda step: gate.wait(10)),
        max_queue_len=3,
    )
    tasks = [asyncio.create_task(listen(client, request([number + 1], 5))) for number in range(9)]
    await asyncio.sleep(0.1)
    refused = [task.exception() for task in tasks if task.done()]
    assert len(refused) == 4 and all(isinstance(error, Overloaded) for error in refused)
    assert all(not error.draining and 1 <= error.retry_after_s <= 10 for error in refused)  # type: ignore[union-attr]
    gate.set()
    heard = [result for result in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(result, Heard)]
    assert len(heard) == 5
    assert (await listen(client, request([9], 5))).text() == said([9], 5)


async def test_drain_refuses_waits_and_ends_the_rest(start) -> None:
    gate = threading.Event()
    client = await start(build=lambda config: FakeRunner(config, before_step=lambda step: step < 6 or gate.wait(20)))
    short = asyncio.create_task(listen(client, request([1], 3, name="short")))
    await short
    stuck = asyncio.create_task(listen(client, request([2], 100, name="stuck", n=2)))
    await asyncio.sleep(0.05)
    await client.drain(0.1)
    gate.set()
    heard = await stuck
    assert [heard.last(index).finish_reason for index in range(2)] == ["error", "error"]
    assert client.is_draining and "shutting down" in (heard.last().error or "")
    with pytest.raises(Overloaded) as refused:
        await listen(client, request([1]))
    assert refused.value.draining
    await idle(client)


async def test_drain_lets_running_requests_finish(start) -> None:
    client = await start(build=lambda config: FakeRunner(config, step_s=0.002))
    running = asyncio.create_task(listen(client, request([1], 50)))
    await asyncio.sleep(0.02)
    await client.drain(20.0)
    assert (await running).text() == said([1], 50)


async def test_close_ends_what_runs(start) -> None:
    client = await start(build=lambda config: FakeRunner(config, step_s=0.005))
    running = asyncio.create_task(listen(client, request([1], 100)))
    await asyncio.sleep(0.03)
    await client.close()
    assert (await running).last().finish_reason == "error"
    assert not client.is_alive
    await client.close()


async def test_what_ends_an_output_is_withheld_until_its_grammar_starts(start, monkeypatch) -> None:
    """See tests/grammar/test_constraints.py: an output ended inside its reasoning, before its grammar had started."""
    client = await start()
    sent = []
    send = client._channel.send
    monkeypatch.setattr(client._channel, "send", lambda message: (sent.append(message), send(message)))
    late = GrammarSpec(kind="regex", text="a", starts_after=(5, 6))
    for grammar, ignore_eos, withheld in (
        (late, False, (*client.model_config.eos_token_ids, 9)),
        (late, True, (9,)),
        (GrammarSpec(kind="regex", text="a"), False, ()),
    ):
        sampling = SamplingParams(max_tokens=3, stop_token_ids=(9,), ignore_eos=ignore_eos)
        with pytest.raises(InvalidRequest, match="constrained decoding is off"):
            await listen(client, GenerationRequest("r", [1], sampling, grammar=grammar))
        added = next(message for message in sent if isinstance(message, AddRequest))
        assert added.grammar is not None and set(added.grammar.withheld) == set(withheld)
        sent.clear()


async def test_numbers_are_there_before_the_first_request() -> None:
    """The engine's first snapshot was lost when it came in one batch with `Ready`: a server that nobody had asked yet
    had no gauges in /metrics."""
    engine = EngineThread(engine_config(), FakeRunner)
    await asyncio.sleep(0.2)  # long enough for both to be waiting
    ready = await asyncio.to_thread(wait_ready, engine, 20.0)
    client = AsyncEngineClient(engine, ready, engine_config().model, ByteTokenizer(), TEMPLATE, None)
    for _ in range(2000):
        if client.stats is not None:
            break
        await asyncio.sleep(0.005)
    assert client.stats is not None and client.stats.num_running == 0
    await client.close()


async def test_command_that_gets_no_answer_times_out(start) -> None:
    gate = threading.Event()
    client = await start(build=lambda config: FakeRunner(config, before_step=lambda step: gate.wait(10)))
    running = asyncio.create_task(listen(client, request([1], 2)))
    await asyncio.sleep(0.05)
    ok, error = await client.command("ping", timeout_s=0.05)
    assert not ok and "ping" in (error or "")
    gate.set()
    await running
    assert await client.command("ping") == (True, None)
