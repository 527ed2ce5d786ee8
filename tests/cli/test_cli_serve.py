"""`tokenspeed serve` up to the point where the server starts: wiring, `--dry-run`, users' errors."""

from __future__ import annotations

import json

import pytest

from tokenspeed.cli import serve
from tokenspeed.cli.main import main
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.flags import declared_flags
from tokenspeed.config.resolve import LONGER_CONTEXT_VARIABLE

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
}


@pytest.fixture
def folder(tmp_path):
    """A model without weights, for `--load-format dummy`."""
    place = tmp_path / "tiny"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return str(place)


@pytest.fixture
def started(monkeypatch):
    """Takes the server's place: a list that gets (engine config, server config, startup timeout)."""
    calls: list[tuple] = []

    def run_server(engine, server, startup_timeout_s):
        calls.append((engine, server, startup_timeout_s))
        return 7

    monkeypatch.setattr(serve, "run_server", run_server)
    return calls


def test_serve_starts_the_server_and_returns_its_exit_code(folder, started):
    argv = ["serve", folder, "--load-format", "dummy", "--port", "0", "--seed", "3", "--engine-startup-timeout", "60"]
    assert main(argv) == 7
    ((engine, server, timeout_s),) = started
    assert (engine.model.hidden_size, engine.load_format, engine.seed) == (64, "dummy", 3)
    assert engine.checkpoint.config_path.endswith("config.json")
    assert (server.port, server.served_model_names, timeout_s) == (0, (folder,), 60.0)


def test_a_seed_is_drawn_when_none_is_given(folder, started):
    for _ in range(2):
        main(["serve", folder, "--load-format", "dummy"])
    first, second = (call[0].seed for call in started)
    assert first != second, "two draws out of 2^30 agree: the seed is not drawn"


def test_dry_run_prints_choices_with_reasons_and_starts_nothing(folder, started, capsys):
    assert main(["serve", folder, "--load-format", "dummy", "--dry-run", "--api-key", "sesame"]) == 0
    out = capsys.readouterr().out
    assert started == []
    titles = [line for line in out.splitlines() if not line.startswith(" ")]
    assert titles == ["choices:", "engine:", "model:", "checkpoint:", "server:"]
    assert "  --dtype: float32\n" in out
    assert "  --chunked-prefill-size: 512\n" in out and "max_num_batched_tokens" not in out
    assert "  --drain-timeout: 30.0\n" in out and "  kv_memory_bytes: " in out
    known = {declared.field_name for declared in declared_flags(EngineArgs)}
    assert set(serve.OTHER_NAMES.values()) <= known
    assert "  --dtype = float32: the checkpoint is float32\n" in out
    assert "  --max-model-len: 512\n" in out
    assert "  --attention-backend = auto: chosen at start; the log says" in out
    assert "sesame" not in out and "--api-key: 1 given" in out


def test_overrides_reach_the_model(folder, started):
    main(["serve", folder, "--load-format", "dummy", "--hf-overrides", '{"max_position_embeddings": 256}'])
    assert started[0][0].max_model_len == 256


def test_another_tokenizer(folder, started, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    main(["serve", folder, "--load-format", "dummy", "--tokenizer", str(other)])
    assert started[0][0].checkpoint.tokenizer_path == str(other)


def test_a_missing_tokenizer_is_said_so(folder, started, capsys):
    assert main(["serve", folder, "--load-format", "dummy", "--tokenizer", "./nowhere"]) == 2
    assert "tokenizer './nowhere' is not a folder" in capsys.readouterr().err


def test_chat_template_from_a_file_or_as_text(folder, started, tmp_path, capsys):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    main(["serve", folder, "--load-format", "dummy", "--chat-template", str(file)])
    main(["serve", folder, "--load-format", "dummy", "--chat-template", "{% raw %}x{% endraw %}"])
    assert [call[1].chat_template for call in started] == ["{{ messages }}", "{% raw %}x{% endraw %}"]
    assert main(["serve", folder, "--load-format", "dummy", "--chat-template", "missing.jinja"]) == 2
    assert "missing.jinja" in capsys.readouterr().err


def test_longer_context_by_environment(folder, started, monkeypatch, capsys):
    argv = ["serve", folder, "--load-format", "dummy", "--max-model-len", "600"]
    assert main(argv) == 2
    assert LONGER_CONTEXT_VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(LONGER_CONTEXT_VARIABLE, "1")
    assert main(argv) == 7
    assert started[0][0].max_model_len == 600


@pytest.mark.parametrize("argv", [["does/not/exist/here"], ["--load-format", "dummy", "./nowhere"]])
def test_a_missing_model_is_one_line(argv, capsys):
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenspeed: error: ") and argv[-1] in line
