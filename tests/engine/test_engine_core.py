"""The loop alone: scheduler, fake runner and a queue channel."""

from __future__ import annotations

import logging
import threading

import msgspec
import pytest
from fake_runner import EOS, NAN_TOKEN, FakeRunner, continuation, engine_config

from tokenspeed.engine.channel import LocalClientEnd, local_channel
from tokenspeed.engine.run import EXIT_CHECKPOINT, EXIT_CONFIG, EXIT_FAILED, EXIT_OK, run_engine
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Continued,
    EngineStats,
    Fatal,
    FromEngine,
    Outputs,
    Ready,
    Reply,
    SequenceOutput,
    Shutdown,
    ToEngine,
)
from tokenspeed.protocol.sampling import SamplingParams


class Driver:
    """An engine on a thread and everything it said."""

    def __init__(self, config=None, build=FakeRunner) -> None:
        self.client, engine_end = local_channel()
        self.said: list[FromEngine] = []
        self.exit_code: int | None = None
        config = config or engine_config()

        def life() -> None:
            self.exit_code = run_engine(engine_end, config, build)
            self.client.wake()

        self.thread = threading.Thread(target=life, daemon=True)
        self.thread.start()

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.client.send(message)

    def until(self, done) -> None:
        """Read until `done(self)`; a silent engine fails the test."""
        while not done(self):
            news = self.client.receive(10.0)
            assert news, f"the engine fell silent after {self.said}"
            self.said += news

    def join(self) -> None:
        self.thread.join(10.0)
        assert not self.thread.is_alive()
        self.said += self.client.receive(0)

    def outputs(self, request_id: str, index: int = 0) -> list[SequenceOutput]:
        return [
            output
            for message in self.said
            if isinstance(message, Outputs)
            for output in message.sequences
            if (output.request_id, output.index) == (request_id, index)
        ]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token_id for output in self.outputs(request_id, index) for token_id in output.token_ids]

    def reasons(self, request_id: str, index: int = 0) -> list[str]:
        return [output.finish_reason for output in self.outputs(request_id, index) if output.finish_reason]

    def of(self, kind):
        return [message for message in self.said if isinstance(message, kind)]


def request(request_id: str, prompt: list[int], max_tokens: int = 8, **fields) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields),
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_each_request_alone(overlap: bool) -> None:
    engine = Driver(engine_config(overlap=overlap, num_pages=24, max_model_len=64))
    prompts = {f"r{number}": [number + 1] * (3 + 5 * number) for number in range(8)}
    engine.send(*(request(name, prompt, 10) for name, prompt in prompts.items()))
    engine.until(lambda e: all(e.reasons(name) for name in prompts))
    engine.send(Command(1, "check"), Shutdown())
    engine.join()
    assert engine.exit_code == EXIT_OK
    assert isinstance(engine.said[0], Ready)
    for name, prompt in prompts.items():
        assert engine.tokens(name) == continuation(prompt, 10)
        assert engine.reasons(name) == ["length"]
    assert engine.of(Reply) == [Reply(call_id=1, ok=True)]


@pytest.mark.parametrize("overlap", [True, False])
def test_steady_steps_are_told_as_columns(overlap: bool) -> None:
    engine = Driver(engine_config(overlap=overlap, num_pages=32))
    engine.send(request("a", [1, 2, 3], 30), request("b", [4, 5], 30))
    engine.until(lambda e: e.reasons("a") and e.reasons("b"))
    engine.send(Command(1, "check"), Command(2, "stats"), Shutdown())
    engine.join()
    steps = [message.sequences for message in engine.of(Outputs)]
    assert sum(isinstance(news, Continued) for news in steps) > 20
    assert engine.tokens("a") == continuation([1, 2, 3], 30)
    assert engine.tokens("b") == continuation([4, 5], 30)
    checked, counted = engine.of(Reply)
    assert checked.ok
    assert counted.stats.num_generated_tokens == 60


def test_overlap_queues_a_step_before_the_one_before_has_ended() -> None:
    """Without overlap the plan for step 1 could not exist while step 0 waits."""
    may_go = threading.Event()
    queued = threading.Event()

    class Watched(FakeRunner):
        def execute(self, plan):
            if plan.step_id == 1:
                queued.set()
            return super().execute(plan)

    engine = Driver(build=lambda config: Watched(config, before_step=lambda step_id: may_go.wait(10)))
    engine.send(request("a", [1, 2, 3], 4))
    assert queued.wait(10)
    may_go.set()
    engine.until(lambda e: e.reasons("a"))
    engine.send(Shutdown())
    engine.join()
    assert engine.tokens("a") == continuation([1, 2, 3], 4)


def test_a_request_that_arrives_during_a_step_runs_beside_the_one_that_runs() -> None:
    runner: list[FakeRunner] = []
    started, may_go = threading.Event(), threading.Event()

    def hold(step_id: int) -> None:
        if step_id == 3:
            started.set()
            assert may_go.wait(10)

    def build(config):
        runner.append(FakeRunner(config, before_step=hold))
        return runner[0]

    engine = Driver(build=build)
    engine.send(request("long", [1], 60))
    assert started.wait(10)
    engine.send(request("late", [2], 2))
    may_go.set()
    engine.until(lambda e: e.reasons("late") and e.reasons("long"))
    engine.send(Shutdown())
    engine.join()
    both = [plan.step_id for plan in runner[0].plans if len(plan.rows) == 2]
    assert both and both[0] <= 5, "step 3 runs, 4 may be queued already, 5 must hold it"


def test_idle_engine_sleeps_and_wakes(caplog: pytest.LogCaptureFixture) -> None:
    engine = Driver()
    engine.until(lambda e: e.of(EngineStats))
    assert engine.client.receive(0.3) == [], "an idle engine says nothing"
    engine.send(request("a", [5], 1))
    engine.until(lambda e: e.reasons("a"))
    engine.send(Shutdown())
    engine.join()


def test_a_failed_step_ends_every_sequence_and_the_engine() -> None:
    def fail(step_id: int) -> None:
        if step_id == 4:
            raise RuntimeError("the device is on fire")

    runner: list[FakeRunner] = []

    def build(config):
        runner.append(FakeRunner(config, before_step=fail))
        return runner[0]

    engine = Driver(build=build)
    engine.send(*(request(f"r{number}", [number + 1] * 6, 30, n=2) for number in range(5)))
    engine.join()
    assert engine.exit_code == EXIT_FAILED
    assert engine.of(Fatal) == [Fatal("RuntimeError: the device is on fire")] == engine.said[-1:]
    for number in range(5):
        for index in range(2):
            assert engine.reasons(f"r{number}", index) == ["error"]
    assert runner[0].is_closed


def test_a_poisoned_row_fails_alone() -> None:
    engine = Driver()
    engine.send(request("bad", [1, NAN_TOKEN], 9), request("good", [3, 4], 9))
    engine.until(lambda e: e.reasons("bad") and e.reasons("good"))
    engine.send(Command(7, "check"), Shutdown())
    engine.join()
    assert engine.reasons("bad") == ["error"] and "NaN" in engine.outputs("bad")[-1].error
    assert engine.tokens("good") == continuation([3, 4], 9)
    assert engine.of(Reply)[0].ok and engine.exit_code == EXIT_OK


def test_a_request_the_scheduler_refuses_fails_alone() -> None:
    engine = Driver()
    engine.send(request("long", [1] * 500), request("twice", [2], 50), request("twice", [3]), request("good", [4], 3))
    engine.until(lambda e: e.reasons("good") and e.reasons("long") and e.reasons("twice"))
    engine.send(Shutdown())
    engine.join()
    assert engine.reasons("long") == ["error"]
    assert engine.tokens("good") == continuation([4], 3)
    assert engine.exit_code == EXIT_OK


def test_abort_of_one_sequence_leaves_its_sisters() -> None:
    gate = threading.Event()
    engine = Driver(build=lambda config: FakeRunner(config, before_step=lambda step: step < 5 or gate.wait(10)))
    engine.send(request("a", [1, 2], 40, n=3))
    engine.until(lambda e: e.tokens("a", 2))
    engine.send(AbortRequest("a", 1), AbortRequest("nobody"), AbortRequest("a", 9))
    gate.set()
    engine.until(lambda e: all(e.reasons("a", index) for index in range(3)))
    engine.send(Shutdown())
    engine.join()
    assert [engine.reasons("a", index) for index in range(3)] == [["length"], ["abort"], ["length"]]


def test_shutdown_ends_what_runs() -> None:
    engine = Driver(build=lambda config: FakeRunner(config, step_s=0.01))
    engine.send(*(request(f"r{number}", [number], 100) for number in range(6)))
    engine.until(lambda e: e.tokens("r0"))
    engine.send(Shutdown())
    engine.join()
    assert [engine.reasons(f"r{number}") for number in range(6)] == [["abort"]] * 6
    assert engine.exit_code == EXIT_OK and not engine.of(Fatal)


def test_commands() -> None:
    engine = Driver(build=lambda config: FakeRunner(config, step_s=0.005))
    engine.send(Command(1, "ping"), request("a", [1] * 9, 60), Command(2, "flush_cache"), Command(3, "stats"))
    engine.until(lambda e: len(e.of(Reply)) == 3)
    ping, refused, stats = engine.of(Reply)
    assert (ping.call_id, ping.ok) == (1, True)
    assert not refused.ok and "running or waiting" in refused.error
    assert stats.stats is not None and stats.stats.num_running + stats.stats.num_waiting == 1
    engine.until(lambda e: e.reasons("a"))
    engine.send(Command(4, "flush_cache"), Command(5, "check"))
    engine.until(lambda e: len(e.of(Reply)) == 5)
    assert all(reply.ok for reply in engine.of(Reply)[3:])
    engine.send(Command(6, "stats"))
    engine.until(lambda e: len(e.of(Reply)) == 6)
    assert engine.of(Reply)[-1].stats.num_pages_cached == 0
    engine.send(Shutdown())
    engine.join()


def test_stats_hold_every_step_once() -> None:
    """The log takes snapshots of its own; the metrics must lose no step by it."""
    runner: list[FakeRunner] = []

    def build(config):
        runner.append(FakeRunner(config))
        return runner[0]

    logging.getLogger("tokenspeed").setLevel(logging.INFO)
    try:
        engine = Driver(engine_config(overlap=False), build)
        engine.send(*(request(f"r{number}", [number] * 7, 90) for number in range(3)))
        engine.until(lambda e: all(e.reasons(f"r{number}") for number in range(3)))
        engine.send(Command(1, "stats"))
        engine.until(lambda e: e.of(Reply))
        engine.send(Shutdown())
        engine.join()
    finally:
        logging.getLogger("tokenspeed").setLevel(logging.NOTSET)
    snapshots = engine.of(EngineStats) + [reply.stats for reply in engine.of(Reply)]
    assert sorted(tokens for stats in snapshots for tokens in stats.step_tokens) == sorted(
        plan.num_tokens for plan in runner[0].plans
    )


def test_log_lines_of_the_contract(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tokenspeed"):
        engine = Driver()
        engine.send(request("a", [1] * 20, 90))
        engine.until(lambda e: len(e.tokens("a")) > 5)
        engine.send(request("b", [1] * 20, 10))
        engine.until(lambda e: e.reasons("a"))
        engine.send(Shutdown())
        engine.join()
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.engine.step_log"]
    first = "Prefill batch. #new-seq: 1, #new-token: 16, #cached-token: 0, #running-req: 1, #queue-req: 0"
    assert lines[0] == first
    assert any(line.startswith("Mix batch. #new-seq: 1, #new-token: 4, #cached-token: 16,") for line in lines)
    decodes = [line for line in lines if line.startswith("Decode batch. #running-req: ")]
    assert 1 <= len(decodes) <= 2 and "#pages(active/cached/total): " in decodes[0]


def test_one_log_line_for_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    """The bug: each step with a prompt wrote a line, hundreds a second. At INFO there are decode lines only, one every
    `--decode-log-interval` steps."""
    with caplog.at_level(logging.INFO, "tokenspeed"):
        engine = Driver(msgspec.structs.replace(engine_config(), decode_log_interval=10))
        engine.send(request("a", [1] * 20, 90))
        engine.until(lambda e: e.reasons("a"))
        engine.send(Shutdown())
        engine.join()
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.engine.step_log"]
    assert 8 <= len(lines) <= 9 and all(line.startswith("Decode batch. ") for line in lines)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("--block-size is 3"), EXIT_CONFIG, "--block-size is 3"),
        (CheckpointError("model.safetensors: truncated"), EXIT_CHECKPOINT, "model.safetensors: truncated"),
        (ValueError("surprise"), EXIT_FAILED, "ValueError: surprise"),
    ],
)
def test_what_the_builder_raises_reaches_the_client(error: Exception, code: int, text: str) -> None:
    def build(config):
        raise error

    engine = Driver(build=build)
    engine.join()
    assert engine.said == [Fatal(text)] and engine.exit_code == code


def test_a_scheduler_that_stalls_is_a_dead_engine_not_a_hung_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.scheduler.scheduler.Scheduler.plan", lambda self: None)
    engine = Driver()
    engine.send(request("a", [1]))
    engine.join()
    assert engine.reasons("a") == ["error"] and engine.exit_code == EXIT_FAILED


def test_the_eos_token_stops() -> None:
    """The fake model never says EOS by itself; a prompt cannot make it, so a stop token id stands in for it."""
    prompt = [9, 9]
    stop = continuation(prompt, 5)[4]
    first = continuation(prompt, 5).index(stop)
    engine = Driver()
    engine.send(request("a", prompt, 20, stop_token_ids=(stop, EOS)))
    engine.until(lambda e: e.reasons("a"))
    engine.send(Shutdown())
    engine.join()
    assert engine.tokens("a") == continuation(prompt, first + 1)
    assert engine.outputs("a")[-1].stop_token_id == stop


def test_local_client_end_refuses_after_close() -> None:
    client, _ = local_channel()
    assert isinstance(client, LocalClientEnd)
    client.close()
    with pytest.raises(Exception, match="closed"):
        client.send(Shutdown())
