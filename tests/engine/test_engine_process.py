"""Engines in processes of their own (with the fake runner): start, signals, death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import msgspec
import pytest
from fake_runner import TEMPLATE, ByteTokenizer, continuation, engine_config

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine import process
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.interface import GenerationRequest
from tokenspeed.engine.launch import EngineProcess, engine_environment, wait_ready
from tokenspeed.protocol.errors import CheckpointError, ConfigError, EngineDead
from tokenspeed.protocol.messages import Command, Reply
from tokenspeed.protocol.sampling import SamplingParams

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "fake_process.py"))


def start(config: EngineConfig | None = None) -> EngineProcess:
    return EngineProcess(config or engine_config(), "info", COMMAND)


def directory_of(engine: EngineProcess) -> str:
    return engine._ipc.directory


async def connect() -> tuple[EngineProcess, AsyncEngineClient]:
    engine = start()
    ready = await asyncio.to_thread(wait_ready, engine, 30.0)
    assert ready.report == ["fake runner: no device"]
    return engine, AsyncEngineClient(engine, ready, engine_config().model, ByteTokenizer(), TEMPLATE, None)


def request(name: str, prompt: list[int], max_tokens: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n))


async def listen(client: AsyncEngineClient, wanted: GenerationRequest) -> tuple[list[int], list[list[str]]]:
    """(token ids of sequence 0, finish reasons of each sequence)."""
    ids: list[int] = []
    reasons: list[list[str]] = [[] for _ in range(wanted.sampling.n)]
    async for event in client.generate(wanted):
        assert not reasons[event.index], "an event after the terminal one"
        ids += event.token_ids if event.index == 0 else []
        reasons[event.index] += [event.finish_reason] if event.finish_reason else []
    return ids, reasons


async def test_requests_through_a_process_and_orderly_end() -> None:
    engine, client = await connect()
    heard = await asyncio.gather(*(listen(client, request("r", [number + 1] * 9, 12)) for number in range(6)))
    assert [ids for ids, _ in heard] == [continuation([number + 1] * 9, 12) for number in range(6)]
    assert await client.command("check") == (True, None)
    directory = directory_of(engine)
    await client.close()
    assert engine.exit_code == 0 and not os.path.exists(directory)


async def test_kill_9_in_the_middle_ends_every_sequence_once() -> None:
    engine, client = await connect()
    wanted = [request(f"r{number}", [number + 1] * 5, 100, n=1 + number % 2) for number in range(8)]
    tasks = [asyncio.create_task(listen(client, one)) for one in wanted]
    while client.stats is None or client.stats.num_generated_tokens < 20:
        await asyncio.sleep(0.01)
    os.kill(engine.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    for one, result in zip(wanted, results, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, EngineDead) and "SIGKILL" in str(result)
        else:
            assert result[1] == [["error"]] * one.sampling.n
    assert any(not isinstance(result, BaseException) for result in results), "some had begun"
    assert not client.is_alive
    assert await client.command("ping") == (False, "the engine process was ended by SIGKILL")
    directory = directory_of(engine)
    await client.close()
    assert not os.path.exists(directory)


async def test_a_signal_without_a_name_is_a_death_like_others() -> None:
    """Python names two of the real-time signals; looking for the name of another ended the thread that receives, and
    requests waited for ever behind a healthy /health."""
    engine, client = await connect()
    running = asyncio.create_task(listen(client, request("r", [3], 100)))
    while client.stats is None or client.stats.num_generated_tokens < 5:
        await asyncio.sleep(0.01)
    os.kill(engine.pid, signal.SIGRTMIN + 6)
    assert (await asyncio.wait_for(running, 20))[1] == [["error"]]
    assert await client.command("ping") == (False, f"the engine process was ended by signal {signal.SIGRTMIN + 6}")
    await client.close()


async def test_ctrl_c_and_sigterm_do_not_end_an_engine_whose_server_drains() -> None:
    engine, client = await connect()
    running = asyncio.create_task(listen(client, request("r", [3], 60)))
    while client.stats is None or client.stats.num_generated_tokens < 5:
        await asyncio.sleep(0.01)
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    assert await running == (continuation([3], 60), [["length"]])
    await client.close()
    assert engine.exit_code == 0


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("config error", ConfigError, "--attention-backend is 'config error'; choose another"),
        ("checkpoint error", CheckpointError, "model.gguf: truncated at byte 7"),
        ("bug", EngineDead, "the engine could not start: ZeroDivisionError: a bug"),
        ("vanish", EngineDead, "the engine exited with code 9 before it was ready; its log says why"),
    ],
)
def test_start_errors_keep_their_words(fault: str, kind: type[Exception], text: str) -> None:
    engine = start(msgspec.structs.replace(engine_config(), attention_backend=fault))
    with pytest.raises(kind) as raised:
        wait_ready(engine, 30.0)
    assert str(raised.value) == text
    assert engine.exit_code is not None and not os.path.exists(directory_of(engine))


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("sys.modules['torch'] = None", EngineDead, "ModuleNotFoundError: import of torch halted"),
        ("process.start_early = lambda config: open('/proc/nowhere')", EngineDead, "FileNotFoundError: "),
        ("process.start_early = refuse", ConfigError, "no folder can be written; set TOKENSPEED_CACHE"),
    ],
)
def test_what_fails_before_the_model_keeps_its_words(fault: str, kind: type[Exception], text: str) -> None:
    """Regression: both happened before the channel was open, and only the log said why."""
    code = (
        "import sys\nfrom tokenspeed.engine import process\nfrom tokenspeed.protocol.errors import ConfigError\n"
        "def refuse(config): raise ConfigError('no folder can be written; set TOKENSPEED_CACHE')\n"
        f"{fault}\nsys.exit(process.main())"
    )
    engine = EngineProcess(engine_config(), "info", (sys.executable, "-c", code))
    with pytest.raises(kind, match=text):
        wait_ready(engine, 30.0)


def test_compile_workers_end_when_no_runner_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    workers = types.SimpleNamespace(stop=lambda: stopped.append(True))
    monkeypatch.setattr(process, "start_early", lambda _: workers)
    monkeypatch.setitem(sys.modules, "tokenspeed.runner.build", None)
    with pytest.raises(ImportError):
        process._build(engine_config())
    assert stopped == [True]


def test_a_start_that_takes_too_long_is_ended() -> None:
    engine = start(msgspec.structs.replace(engine_config(), attention_backend="sleep"))
    with pytest.raises(EngineDead, match="not ready after 1 s"):
        wait_ready(engine, 1.0)
    assert engine.exit_code == -signal.SIGKILL


def test_the_engine_dies_with_its_server() -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from test_engine_process import start, wait_ready\n"
        "engine = start(); wait_ready(engine, 30.0)\n"
        "print(engine.pid, engine._ipc.directory, flush=True); time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script, str(HERE)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    word, directory = server.stdout.readline().split()
    pid = int(word)
    assert _is_running(pid) and os.path.isdir(directory)
    server.kill()
    server.wait()
    server.stdout.close()
    for _ in range(1000):
        if not _is_running(pid):
            assert not os.path.exists(directory)
            return
        time.sleep(0.01)
    raise AssertionError("the engine outlived its server by ten seconds")


def test_the_engine_outlives_the_thread_that_started_it() -> None:
    """Linux sends the parent-death signal when the starting thread ends, as a pool's thread may do at any time."""
    engines: list[EngineProcess] = []
    thread = threading.Thread(target=lambda: (engines.append(start()), wait_ready(engines[0], 30.0)))
    thread.start()
    thread.join()
    engine = engines[0]
    engine.channel.send(Command(1, "ping"))
    while Reply(call_id=1, ok=True) not in engine.channel.receive(10.0):
        assert engine.exit_code is None
    engine.stop()
    assert engine.exit_code == 0


def test_signals_do_not_change_how_an_engine_ends() -> None:
    """Regression: one that came while Python was exiting (its thread in the server had ended late) gave -15."""
    engine = start()
    wait_ready(engine, 30.0)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while engine.exit_code is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGTERM)
        time.sleep(0.0005)
    stopping.join()
    assert engine.exit_code == 0


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_client_side_never_imports_torch() -> None:
    script = (
        "import sys, tokenspeed.engine.client, tokenspeed.engine.launch, tokenspeed.engine.interface\n"
        "assert 'torch' not in sys.modules and 'tokenspeed.runner.build' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_engine_bounds_how_long_threads_spin() -> None:
    assert engine_environment({"HOME": "/x"}) == {"HOME": "/x", "GOMP_SPINCOUNT": "10000"}
    assert engine_environment({"OMP_WAIT_POLICY": "active"}) == {"OMP_WAIT_POLICY": "active"}
    assert engine_environment({"GOMP_SPINCOUNT": "7"}) == {"GOMP_SPINCOUNT": "7"}


IN_PROCESS = {
    "LLM": "from tokenspeed import LLM",
    "bench offline": "import tokenspeed.cli.bench as bench; bench.run(['offline', '--help'])",
}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, ("10000", None)), ({"GOMP_SPINCOUNT": "7"}, ("7", None)), ({"OMP_WAIT_POLICY": "active"}, (None, "active"))],
)
@pytest.mark.parametrize("way", IN_PROCESS)
def test_so_does_one_in_this_process_before_torch_is_there(
    way: str, given: dict[str, str], wanted: tuple[str | None, str | None]
) -> None:
    """libgomp reads its variables when torch loads it: what stands there at torch's import counts."""
    script = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("at torch:", os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"), file=sys.stderr)
sys.meta_path.insert(0, Watch())
{IN_PROCESS[way]}
"""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ended = subprocess.run([sys.executable, "-c", script], env={**plain, **given}, capture_output=True, text=True)
    assert f"at torch: {wanted[0]} {wanted[1]}\n" in ended.stderr, ended.stderr
