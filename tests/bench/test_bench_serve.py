"""`tokenspeed bench serve`: its command line, the bodies it sends, and whole runs against a real tiny server."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tiny_model import write_config

from tokenspeed.bench.http_client import open_session
from tokenspeed.bench.serve import Sender, make_sessions, run
from tokenspeed.bench.serve_args import ServeArgs, parse_serve, read_timeouts
from tokenspeed.bench.sessions import Conversation, Session, Turn
from tokenspeed.config.flags import declared_flags
from tokenspeed.config.model import read_model_config
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.text.chat_template import load_chat_template, render_chat_ids
from tokenspeed.text.tokenizer import load_tokenizer

CONTRACT = """
--dataset-name --dataset-path --num-prompts --input-len --output-len --random-input-len --random-output-len
--random-range-ratio --random-prefix-len --sharegpt-output-len --max-model-len --skip-min-tokens-check --backend
--base-url --host --port --endpoint --header --model --served-model-name --tokenizer --skip-tokenizer-init
--insecure --request-rate --burstiness --max-concurrency --num-warmups --ready-check-timeout-sec --ramp-up-strategy
--ramp-up-start-rps --ramp-up-end-rps --seed --ignore-eos --disable-ignore-eos --apply-chat-template --logprobs
--extra-body --extra-request-body --request-id-prefix --label --profile --profile-num-steps --profile-activities
--goodput --percentile-metrics --metric-percentiles --save-result --append-result --save-detailed --result-dir
--output-file --disable-tqdm
"""


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_serve(argv)
    return str(caught.value)


# --- the command line --------------------------------------------------------------------------------------------


def test_the_contracts_defaults():
    args = parse_serve([])
    assert (args.dataset_name, args.num_prompts, args.url, args.path) == (
        "random", 1000, "http://127.0.0.1:8000", "/v1/completions",
    )  # fmt: skip
    assert (args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len) == (
        1024, 128, 0.0, 0,
    )  # fmt: skip
    assert (args.request_rate, args.burstiness, args.num_warmups, args.seed) == (float("inf"), 1.0, 0, 0)
    assert (args.metric_percentiles, args.request_id_prefix, args.ready_check_timeout_sec) == ((99.0,), "bench-", 600)


def test_every_flag_of_the_contract_is_there():
    known = {name for item in declared_flags(ServeArgs) for name in item.flag.names}
    assert not set(CONTRACT.split()) - known


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-promts", "3"], "unknown flag --num-promts; did you mean --num-prompts?"),
        (["serve"], "unexpected word serve"),
        (["--num-prompts", "0"], "--num-prompts is 0, it must be at least 1"),
        (["--dataset-name", "mtbench"], "mtbench is not available"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1.0, it must be between 0 and 0.999"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--goodput", "ttft"], "it must be KEY:MS"),
        (["--goodput", "ttft:-1"], "it must be KEY:MS"),
        (["--header", "x"], "it must be NAME=VALUE"),
        (["--base-url", "localhost"], "must begin with http"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--ignore-eos", "--disable-ignore-eos"], "exclude each other"),
        (["--input-len", "3", "--random-input-len", "3"], "--input-len and --random-input-len exclude each other"),
        (["--base-url", "http://h", "--port", "3"], "--base-url and --port exclude each other"),
        (["--ramp-up-strategy", "linear"], "go together"),
        (["--ramp-up-start-rps", "1"], "go together"),
        (["--burstiness", "2"], "no effect when all requests are sent at once"),
        (["--num-turns", "2"], "--num-turns has no effect on --dataset-name random; it is for multi-turn"),
        (["--result-dir", "x"], "no effect without --save-result"),
        (["--apply-chat-template"], "--apply-chat-template has no effect on --dataset-name random; it is for sharegpt"),
        (["--apply-chat-template", "--dataset-name", "sharegpt", "--dataset-path", "f", "--backend", "openai-chat"],
         "the server applies it there"),
        (["--profile-num-steps", "3"], "--profile-num-steps has no effect without --profile"),
        (["--profile", "--profile-num-steps", "0"], "--profile-num-steps is 0, it must be between 1 and"),
        (["--profile", "--profile-activities", "CPU", "PROTON"], "--profile-activities PROTON is not available"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "not the API of --backend openai-chat"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(argv, words):
    assert words in error_of(*argv)


def test_properties(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    args = parse_serve(["--backend", "openai-chat", "--base-url", "https://h/", "--header", "a=b=c", "d=e",
                        "--goodput", "ttft:200", "tpot:50.5"])  # fmt: skip
    assert (args.url, args.path) == ("https://h", "/v1/chat/completions")
    assert args.headers == {"Authorization": "Bearer secret", "a": "b=c", "d": "e"}
    assert args.goodput_ms == {"ttft": 200.0, "tpot": 50.5}


def test_timeouts_come_from_the_environment(monkeypatch):
    limits, total_s = read_timeouts()
    assert (limits.connect_s, limits.read_s, limits.request_s, total_s) == (30, 1800, 3600, 21600)
    monkeypatch.setenv("TOKENSPEED_BENCH_PER_REQUEST_TIMEOUT_SEC", "5")
    monkeypatch.setenv("TOKENSPEED_BENCH_TOTAL_TIMEOUT_SEC", "7.5")
    limits, total_s = read_timeouts()
    assert (limits.request_s, total_s) == (5, 7.5)
    monkeypatch.setenv("TOKENSPEED_BENCH_SOCK_READ_TIMEOUT_SEC", "soon")
    with pytest.raises(ConfigError, match="TOKENSPEED_BENCH_SOCK_READ_TIMEOUT_SEC is 'soon'"):
        read_timeouts()


# --- sessions and bodies -----------------------------------------------------------------------------------------


def test_warmups_do_not_repeat_in_the_load():
    sessions, warmups = make_sessions(parse_serve(["--num-prompts", "5", "--num-warmups", "2", "--input-len", "9"]), "")
    assert (len(sessions), len(warmups)) == (5, 2)
    assert not {tuple(s.turns[0].new) for s in warmups} & {tuple(s.turns[0].new) for s in sessions}
    alone, none = make_sessions(parse_serve(["--num-prompts", "5", "--input-len", "9"]), "")
    assert (alone, none) == (sessions, [])


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="sends text and needs a tokenizer"):
        make_sessions(parse_serve(["--backend", "openai-chat", "--skip-tokenizer-init"]), "m")
    make_sessions(parse_serve(["--skip-tokenizer-init", "--num-prompts", "1"]), "m")


def test_questions_as_the_chat_template_puts_them(default_checkpoint, tmp_path):
    """The ids are those that the chat API would make of the question."""
    question, answer = "What is the capital of France?", "It is Paris, I think."
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": [{"value": question}, {"value": answer}]}]))
    argv = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "1"]
    argv += ["--tokenizer", default_checkpoint.tokenizer_path]
    (plain,), _ = make_sessions(parse_serve(argv), "")
    assert plain.turns[0].new == question
    (put,), _ = make_sessions(parse_serve([*argv, "--apply-chat-template"]), "")
    tokenizer = load_tokenizer(default_checkpoint, read_model_config(default_checkpoint, {}))
    messages = [{"role": "user", "content": question}]
    assert put.turns[0].new == render_chat_ids(tokenizer, load_chat_template(tokenizer), messages)
    assert put.turns[0].output_len == plain.turns[0].output_len
    assert question in tokenizer.decode(put.turns[0].new)


@pytest.mark.parametrize(
    "argv",
    [
        ["--random-prefix-len", "60", "--input-len", "30", "--output-len", "11"],
        ["--dataset-name", "multi-turn", "--backend", "tokenspeed", "--system-len", "40", "--output-len", "11"],
    ],
)
def test_lengths_above_the_limit_are_refused(argv):
    with pytest.raises(ConfigError, match=r"the longest request has .* tokens, --max-model-len is 100"):
        make_sessions(parse_serve([*argv, "--max-model-len", "100"]), "m")


async def body_of(argv: list[str], session: Session) -> dict[str, Any]:
    async with open_session() as http:
        return Sender(http, parse_serve(argv), "m").body(Conversation(session))


async def test_bodies():
    ids = Session((Turn([1, 2], 7),))
    common = {"model": "m", "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    assert await body_of([], ids) == common | {"prompt": [1, 2], "max_tokens": 7, "ignore_eos": True}
    with_ids = await body_of(["--backend", "tokenspeed", "--logprobs", "2", "--disable-ignore-eos"], ids)
    assert with_ids == common | {"prompt": [1, 2], "max_tokens": 7, "logprobs": 2, "return_token_ids": True}
    chat = await body_of(
        ["--backend", "openai-chat", "--logprobs", "0", "--extra-body", '{"temperature": 1, "x": 2}'],
        Session((Turn("hi", 7),)),
    )
    assert chat == common | {
        "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 0, "temperature": 1, "x": 2,
    }  # fmt: skip


# --- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """`tokenspeed serve` of random weights without a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "tokenspeed", "serve", str(write_config(folder)), "--load-format", "dummy",
               "--skip-tokenizer-init", "--port", "0", "--num-threads", "1", "--served-model-name", "tiny"]  # fmt: skip
    environment = os.environ | {"TOKENSPEED_PROFILER_DIR": str(folder), "TOKENSPEED_PROFILE_WITH_STACK": "0"}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline_s = time.monotonic() + 100
        while (found := re.search(r"ready on http://\S+:(\d+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.05)
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def measure(capsys, port: int, *argv: str, code: int = 0) -> dict[str, Any]:
    """The JSON of a run; everything but the last line is for people."""
    assert run(["--port", str(port), "--random-vocab-size", "320", *argv]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_random_load(capsys, port):
    found = measure(capsys, port, "--num-prompts", "6", "--input-len", "20", "--output-len", "8", "--backend",
                    "tokenspeed", "--max-concurrency", "2", "--num-warmups", "1", "--goodput", "ttft:1e9",
                    "--metric-percentiles", "50,99.9")  # fmt: skip
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "tiny")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 48)
    assert (found["max_concurrent_requests"], found["without_visible_tokens"]) == (2, 0)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["output_throughput"] == pytest.approx(48 / found["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert found[f"median_{name}_ms"] == pytest.approx(found[f"p50_{name}_ms"])
        assert found[f"median_{name}_ms"] > 0 or name == "itl"  # chunks may arrive together, on a busy machine most do
        assert found[f"p99.9_{name}_ms"] >= found[f"p50_{name}_ms"]
    assert found["request_rate"] == "inf"


def test_agent_sessions_hit_the_prefix_cache(capsys, port):
    found = measure(capsys, port, "--dataset-name", "multi-turn", "--backend", "tokenspeed", "--num-prompts", "6",
                    "--num-turns", "3", "--system-len", "64", "--turn-len", "8", "--output-len", "8",
                    "--request-rate", "200")  # fmt: skip
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_input_tokens"] == 2 * (72 + 88 + 104)
    assert found["total_cached_tokens"] >= 2 * (64 + 80)  # whole pages of the turn before


def test_a_server_that_shows_no_tokens(capsys, port):
    found = measure(capsys, port, "--num-prompts", "2", "--input-len", "4", "--output-len", "8")
    assert (found["completed"], found["without_visible_tokens"], found["mean_tpot_ms"]) == (2, 2, 0.0)


def steps_of(trace: str) -> int:
    """Steps in a trace, which is removed: two of one second would have one name."""
    with gzip.open(trace) as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    os.unlink(trace)
    return len([name for name in names if re.fullmatch(r"step \d+", name)])


def test_the_server_profiles_the_load(capsys, port):
    argv = ["--num-prompts", "1", "--input-len", "4", "--output-len", "12", "--backend", "tokenspeed"]
    found = measure(capsys, port, *argv, "--num-warmups", "3", "--profile", "--profile-activities", "CPU")
    assert (found["completed"], found["profile_error"]) == (1, None)
    assert steps_of(found["profile_file"]) == 12, "the warm-ups are not part of it"
    found = measure(capsys, port, *argv, "--profile", "--profile-num-steps", "5")
    assert steps_of(found["profile_file"]) == 5
    assert "profile_file" not in measure(capsys, port, *argv)


def test_a_profile_that_the_server_refuses_ends_the_run(port):
    with pytest.raises(ConfigError, match=r"--profile: \S+/start_profile answers HTTP 400: .*runs on a CPU"):
        run(["--port", str(port), "--num-prompts", "1", "--profile", "--profile-activities", "GPU"])


def test_failures_are_counted_and_shown(capsys, port):
    argv = ["--num-prompts", "2", "--input-len", "4", "--output-len", "9999"]
    assert run(["--port", str(port), "--random-vocab-size", "320", *argv]) == 1
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["failed"] == 2
    assert any("failed 2 x: HTTP 400" in line for line in shown)


def test_results_are_saved(capsys, port, tmp_path):
    argv = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--backend", "tokenspeed"]
    where = ["--result-dir", str(tmp_path / "new"), "--label", "mine"]
    found = measure(capsys, port, *argv, *where, "--save-result", "--save-detailed")
    (file,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(r"mine-infqps-tiny-[\d-]+\.json", file.name)
    saved = json.loads(file.read_text())
    assert saved["output_lens"] == [3, 3]
    assert all(len(gaps) <= 2 for gaps in saved["itls"]) and len(saved["itls"]) == 2
    assert {name: saved[name] for name in found} == found
    for _ in range(2):
        measure(capsys, port, *argv, *where[:2], "--append-result", "--output-file", "all.jsonl")
    lines = (tmp_path / "new" / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [2, 2]


def test_nobody_there():
    with pytest.raises(ConfigError, match=r"does not answer within 0\.1 s .*; start the server"):
        run(["--port", "9", "--ready-check-timeout-sec", "0.1"])


def test_the_load_generator_needs_no_torch():
    code = "import sys, tokenspeed.bench.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
