"""TOKENSPEED_STARTUP_TIMING=1 on real starts: which phases there are, how they nest, whose they are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.observability.startup import VARIABLE

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
# In order; the phase that each lies in.
ENGINE_PHASES = {
    "scheduler.init": None,
    "weights.target": "scheduler.init",
    "weights.allocate": "weights.target",
    "weights.read_copy": "weights.target",
    "weights.postprocess": "weights.target",
    "kv.build": "scheduler.init",
    "executor.init": "scheduler.init",
    "graph.capture": "scheduler.init",
    "kernels.warm_up": "scheduler.init",
}

# What is left of the compilation beside the load is waited for before the pool is sized.
GPU_PHASES = dict(
    [
        *list(ENGINE_PHASES.items())[:1],
        ("kernels.list", "scheduler.init"),
        *list(ENGINE_PHASES.items())[1:5],
        ("kernels.compile", "scheduler.init"),
        *list(ENGINE_PHASES.items())[5:],
    ]
)
PHASES = {"cpu": ENGINE_PHASES, "cuda": GPU_PHASES}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

Record = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def records(log: str) -> list[Record]:
    return [json.loads(text) for text in re.findall(r"tokenspeed\.startup: startup_timing (\{.*\})$", log, re.M)]


def nesting(found: list[Record]) -> dict[str, str | None]:
    """Phase -> the phase it lies in, in order of their starts; every phase has one start and one good end."""
    starts = [record for record in found if record["event"] == "start"]
    ends = {record["span_id"]: record for record in found if record["event"] == "end"}
    assert len(found) == 2 * len(starts) == 2 * len(ends)
    for start in starts:
        end = ends[start["span_id"]]
        assert (end["status"], end["error_type"]) == ("ok", None) and end["duration_s"] >= 0
        assert end["wall_time_ns"] >= start["wall_time_ns"]
        same = ("phase", "pid", "rank", "role", "parent_id")
        assert [end[name] for name in same] == [start[name] for name in same]
    names = {start["span_id"]: start["phase"] for start in starts}
    assert len(set(names.values())) == len(starts), "a phase was recorded twice"
    return {start["phase"]: names.get(start["parent_id"]) for start in starts}


def log_of(command: list[str], log: Path) -> str:
    """What a command says until it ends by itself, or is told to when it serves."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: "1", "TOKENSPEED_CACHE": str(log.parent / "cache")},
        )
    try:
        deadline_s = time.monotonic() + 300
        while process.poll() is None and "ready on http" not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()[-3000:]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.kill()
    return log.read_text()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", DEVICES)
def test_a_server(model: Path, tmp_path: Path, device: str) -> None:
    """The records are there at any log level. Server and engine are two processes, each with spans of its own."""
    command = ["serve", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--port", "0"]
    command += ["--device", device, *(["--num-threads", "1"] if device == "cpu" else []), "--log-level", "warning"]
    command += ["--max-total-tokens", "4096"]  # of a GPU it would take 88 %, and other tests beside it fail
    log = log_of(command, tmp_path / "log")
    assert " INFO " not in "\n".join(line for line in log.splitlines() if "startup_timing" not in line)
    found = records(log)
    server_pid = found[0]["pid"]
    server = [record for record in found if record["pid"] == server_pid]
    engine = [record for record in found if record["pid"] != server_pid]
    assert nesting(server) == {"model.config": None, "tokenizer": None}
    assert [(r["phase"], r["rank"], r["role"]) for r in server if r["event"] == "start"] == [
        ("model.config", 0, "target"),
        ("tokenizer", None, None),
    ]
    assert len({record["pid"] for record in engine}) == 1
    assert list(nesting(engine).items()) == list(PHASES[device].items())
    assert {(record["rank"], record["role"]) for record in engine} == {(0, "target")}


def test_an_engine_in_this_process(model: Path, tmp_path: Path) -> None:
    """`bench offline`: one process, which is quiet by default."""
    sizes = ["--batch", "1", "--prompt-len", "4", "--prefill", "none", "--repeats", "1"]
    command = ["bench", "offline", "--model-config", str(model), "--load-format", "dummy", "--device", "cpu", *sizes]
    found = records(log_of([*command, "--num-threads", "1"], tmp_path / "log"))
    assert list(nesting(found).items()) == [("model.config", None), *ENGINE_PHASES.items()]
    assert {(record["rank"], record["role"]) for record in found} == {(0, "target")}
