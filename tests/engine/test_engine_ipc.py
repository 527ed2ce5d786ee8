"""The channel between processes: every message both ways, privacy, and frames that are no messages."""

from __future__ import annotations

import os
import pickle
import random
import stat
import threading
import time

import msgspec
import pytest
import zmq

from tokenspeed.engine.ipc import IpcClientEnd, IpcEngineEnd
from tokenspeed.protocol.errors import ConfigError, EngineDead
from tokenspeed.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Continued,
    EngineStats,
    Fatal,
    Logprobs,
    Outputs,
    ProfileOptions,
    Ready,
    Reply,
    SequenceOutput,
    Shutdown,
)
from tokenspeed.protocol.sampling import SamplingParams

STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_pages_total=3,
    num_pages_used=4,
    num_pages_cached=5,
    num_preemptions=6,
    num_prefix_hit_tokens=7,
    num_prompt_tokens=8,
    num_generated_tokens=9,
    step_tokens=[1, 2],
    num_nan_aborted=3,
)
TO_ENGINE = [
    AddRequest(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(n=2, stop=("x", "雪"), logit_bias={5: -1.5}, stop_token_ids=(7,), seed=-(2**63)),
        priority=-3,
        cache_salt="salt",
        arrival_s=1.5,
    ),
    AbortRequest("a"),
    AbortRequest("a", 3),
    Command(7, "flush_cache"),
    Command(8, "start_profile", ProfileOptions(output_dir="/x", num_steps=3, activities=("CPU",), with_stack=False)),
    Shutdown(),
]
FROM_ENGINE = [
    Ready(max_model_len=1, max_num_seqs=2, kv_capacity_tokens=3, vocab_size=4, report=["x because y"]),
    Outputs(
        [
            SequenceOutput(request_id="a", token_ids=[1], logprobs=[Logprobs(1, -0.5, 1, [2], [-1.0])]),
            SequenceOutput(request_id="a", index=3, finish_reason="stop", stop_token_id=9, num_cached_tokens=16),
            SequenceOutput(request_id="b", finish_reason="error", error="NaN", prompt_logprobs=[]),
        ]
    ),
    Outputs(Continued(["a", "b"], [0, 3], [5, 6])),
    STATS,
    Reply(call_id=3, ok=True, stats=STATS),
    Reply(call_id=4, ok=False, error="no"),
    Reply(call_id=5, ok=True, text="/x/trace"),
    Fatal("gone"),
]


@pytest.fixture
def ends():
    client = IpcClientEnd()
    engine = IpcEngineEnd(client.directory)
    engine.send(FROM_ENGINE[0])
    assert client.receive(5) == FROM_ENGINE[:1]
    yield client, engine
    engine.close()
    client.close()


def collect(receive, count):
    got = []
    for _ in range(100):  # a receive that found only bad frames is empty
        got += receive(5)
        if len(got) >= count:
            return got
    raise AssertionError(f"only {got} arrived")


def test_every_message_arrives_as_it_was(ends) -> None:
    client, engine = ends
    for message in TO_ENGINE:
        client.send(message)
    assert collect(engine.receive, len(TO_ENGINE)) == TO_ENGINE
    for message in FROM_ENGINE:
        engine.send(message)
    assert collect(client.receive, len(FROM_ENGINE)) == FROM_ENGINE


def test_an_end_that_only_looks_misses_nothing(ends) -> None:
    """The engine's loop never sleeps while it works: it looks, and only asks the socket when something has happened."""
    client, engine = ends
    pauses = random.Random(0)

    def send() -> None:
        for number in range(300):
            client.send(AbortRequest(str(number)))
            if pauses.random() < 0.3:
                time.sleep(pauses.random() / 1000)

    sender = threading.Thread(target=send)
    sender.start()
    got: list = []
    until_s = time.monotonic() + 20
    while len(got) < 300 and time.monotonic() < until_s:
        got += engine.receive(0)
    sender.join()
    assert [message.request_id for message in got] == [str(number) for number in range(300)]
    assert engine.receive(0) == []


def test_news_as_columns_read_like_single_ones() -> None:
    news = Continued(["a", "b"], [0, 3], [5, 6])
    assert len(news) == 2
    assert list(news) == [
        SequenceOutput(request_id="a", token_ids=[5]),
        SequenceOutput(request_id="b", index=3, token_ids=[6]),
    ]


def test_every_kind_of_message_is_in_this_test() -> None:
    from tokenspeed.protocol import messages

    assert {type(message) for message in TO_ENGINE} == set(messages.ToEngine.__args__)
    assert {type(message) for message in FROM_ENGINE} == set(messages.FromEngine.__args__)


def test_receive_returns_empty_after_its_timeout_and_when_woken(ends) -> None:
    client, engine = ends
    assert engine.receive(0) == [] and engine.receive(0.01) == [] and client.receive(0.01) == []
    waiter = threading.Thread(target=lambda: woken.append(client.receive()))
    woken: list[list] = []
    waiter.start()
    client.wake()
    waiter.join(5)
    assert woken == [[]]


def test_directory_is_private_and_removed() -> None:
    client = IpcClientEnd()
    assert stat.S_IMODE(os.stat(client.directory).st_mode) == 0o700
    assert sorted(os.listdir(client.directory)) == ["from_engine.sock", "to_engine.sock"]
    client.close()
    client.close()
    client.wake()
    assert not os.path.exists(client.directory)
    with pytest.raises(EngineDead):
        client.send(Shutdown())


def test_directory_goes_with_an_end_that_nobody_closed() -> None:
    client = IpcClientEnd()
    client._remove()
    assert not os.path.exists(client.directory)
    client.close()


def test_a_path_too_long_for_a_socket_says_what_to_do(tmp_path, monkeypatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        IpcClientEnd()
    assert not list(deep.iterdir())


class Bomb:
    def __reduce__(self):
        return os.abort, ()


BAD_FRAMES = [
    b"\x00",
    b"garbage",
    b"\xc1" * 50,
    b"\x91" * 100_000,  # nested far too deep
    pickle.dumps(Bomb()),
    msgspec.msgpack.encode({"type": "add"}),
    msgspec.msgpack.encode({"type": "unknown"}),
    msgspec.msgpack.encode({"type": "abort", "request_id": 7}),
    # Decodes as a Struct, but its own check refuses it:
    msgspec.msgpack.encode({"type": "add", "request_id": "x", "prompt_token_ids": [1], "sampling": {"top_p": 9.0}}),
    msgspec.msgpack.encode(["outputs"]),
    b"",
]


def test_bad_frames_are_logged_and_dropped(ends, caplog) -> None:
    client, engine = ends

    def dropped() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.engine.ipc"]
        return [text for text in texts if "does not decode" in text]

    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.connect(f"ipc://{client.directory}/from_engine.sock")
        for frame in BAD_FRAMES:
            intruder.send(frame)
        got: list = []
        while len(dropped()) < len(BAD_FRAMES) - 1:
            got += client.receive(5)
    # To the engine only the client's socket leads; it sends the same frames.
    for frame in BAD_FRAMES:
        client._outbox.send(frame)
    client.send(Shutdown())
    engine.send(Fatal("last"))
    assert collect(engine.receive, 1) == [Shutdown()]
    got += collect(client.receive, 1)
    assert got == [Fatal("last")]
    assert len(dropped()) == 2 * (len(BAD_FRAMES) - 1), "the empty frame is a wake-up"


def test_sending_to_an_engine_that_has_gone_says_so(ends) -> None:
    client, engine = ends
    engine.close()
    with pytest.raises(EngineDead):
        for _ in range(500):
            client.send(AbortRequest("a"))
            threading.Event().wait(0.01)
