"""`tokenspeed serve` as a process on the embedded model, through the official client and plain HTTP.

The processes here are real: what they answer is compared with itself (stream and whole, text and ids, twice), because
the model's own correctness is the subject of tests/models.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tokenspeed.checkpoint.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(300)

README = Path(__file__).parents[2] / "README.md"
# `default` is the name that the README's chat asks for.
FLAGS = ("--port", "0", "--max-model-len", "512", "--max-num-seqs", "4", "--served-model-name", "smol", "default")
MESSAGES: list[Any] = [{"role": "user", "content": "Count from one to five in words."}]


class Server:
    """A running `tokenspeed serve`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def stats(self) -> dict[str, Any]:
        return self.http.get("/get_server_info").json()["engine"]


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Server]:
    """Start, wait for the ready line, and leave no process behind."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", "serve", *FLAGS, *flags], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline_s = time.monotonic() + 200
        while (found := re.search(r"tokenspeed ready on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.05)
        server = Server(process, found[1])
        yield server
        server.http.close()
        server.openai.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_checkpoint: Checkpoint) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("server")) as running:
        yield running


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.02)


def test_stream_and_whole_are_the_same_text(server: Server):
    whole = server.openai.chat.completions.create(model="smol", messages=MESSAGES, temperature=0, max_tokens=24)
    stream = server.openai.chat.completions.create(
        model="smol",
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage and last.usage
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details and (last.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_the_readmes_chat_runs(server: Server, capsys: pytest.CaptureFixture[str]):
    code, *_ = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8000/v1" in code and 'model="default"' in code
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_conversation_as_ids_gives_the_same_completion(server: Server):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    chat = server.http.post("/v1/chat/completions", json=body).json()
    ids = server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert ids == chat["prompt_token_ids"]
    text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.startswith("<|im_start|>") and "Count from one to five" in text
    for prompt in (ids, text, [text], [ids]):
        extra = {"add_special_tokens": False, "return_token_ids": True}
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, **extra}
        (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
        assert choice["prompt_token_ids"] == ids and choice["token_ids"] == chat["choices"][0]["token_ids"]


def test_special_tokens_of_the_user_are_text(server: Server):
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    answer = server.http.post("/tokenize", json=body).json()
    plain = server.http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()
    assert plain["count"] == 1 and plain["tokens"][0] in answer["tokens"]  # the template's own
    assert answer["tokens"].count(plain["tokens"][0]) == 2  # the system turn's and the user turn's, not the user's text


def test_logprobs_of_echo_and_of_output_agree(server: Server):
    body = {"prompt": "One two three", "temperature": 0, "max_tokens": 4, "logprobs": 2, "return_token_ids": True}
    (made,) = server.http.post("/v1/completions", json=body).json()["choices"]
    ids = made["prompt_token_ids"] + made["token_ids"]
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 2}
    (echoed,) = server.http.post("/v1/completions", json=body).json()["choices"]
    assert len(echoed["logprobs"]["tokens"]) == len(ids) and echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["tokens"][-4:] == made["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][-4:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=0.1)


def test_n_with_a_seed_repeats(server: Server):
    body = {"messages": MESSAGES, "temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 8}
    first, again = (server.http.post("/v1/chat/completions", json=body).json() for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]] and len(set(texts)) == 3


def test_stop_strings(server: Server):
    body = {"prompt": "a b c d e f", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    (free,) = server.http.post("/v1/completions", json=body).json()["choices"]
    stop = free["text"][5:8]
    (choice,) = server.http.post("/v1/completions", json={**body, "stop": stop}).json()["choices"]
    assert choice["text"] == free["text"].partition(stop)[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_prompt_that_is_too_long_names_both_numbers(server: Server):
    response = server.http.post("/v1/completions", json={"prompt": [5] * 600})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "600" in error["message"] and "512" in error["message"]
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_disconnect_frees_the_pages(server: Server):
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
    # Flushing is refused while any request runs.
    until(lambda: server.http.post("/flush_cache").status_code == 200)
    until(lambda: server.stats()["num_running"] == 0)
    assert server.stats()["num_pages_used"] == 0
    assert server.http.post("/debug/check").status_code == 200


def test_probes_and_metrics(server: Server):
    for path in ("/health", "/liveness", "/readiness", "/health_generate", "/version", "/openapi.json", "/v1/models"):
        assert server.http.get(path).status_code == 200, path
    text = server.http.get("/metrics").text
    assert 'tokenspeed:num_requests_running{model_name="smol"}' in text
    assert re.search(r'tokenspeed:iteration_tokens_total_count\{model_name="smol"\} [1-9]', text)


def test_sigterm_lets_a_stream_end_and_exits_with_0(server: Server):
    """The last one: it ends the module's server."""
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    assert server.process.wait(60) == 0


def test_the_engines_death_ends_the_server(tmp_path: Path, default_checkpoint: Checkpoint):
    with started(tmp_path) as server:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for child in _children(server.process.pid):
                os.kill(child, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"error"' in rest[-2] and "SIGKILL" in rest[-2]
        assert server.process.wait(60) == 1


def test_a_taken_port_is_one_line(tmp_path: Path, default_checkpoint: Checkpoint):
    with _listening() as port:
        command = [sys.executable, "-m", "tokenspeed", "serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "Traceback" not in done.stderr


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


@contextmanager
def _listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
