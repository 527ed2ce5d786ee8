"""Flags: parsing, limits, refusals, and the generated page and list."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tokenspeed.config.args import FLAGS, EngineArgs, parse_args
from tokenspeed.config.flag_docs import flag_freeze, flag_page
from tokenspeed.config.refused import REFUSED, find_refusal
from tokenspeed.protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_args(argv)
    return str(raised.value)


# --- generated files ---------------------------------------------------------------------------------------------


def test_flags_are_frozen():
    """A flag is a promise. Changed on purpose: `make docs` renews this list and the page."""
    assert (ROOT / "tests/config/flags.txt").read_text() == flag_freeze(), "run `make docs` and commit what it changed"


def test_flag_page_is_up_to_date():
    page = (ROOT / "docs/configuration/server.md").read_text()
    assert page == flag_page(), "run `make docs` and commit what it changed"


def test_page_names_every_flag():
    page = flag_page()
    for item in FLAGS:
        for name in (*item.flag.names, *item.flag.off_names):
            assert f"`{name}`" in page
        assert item.flag.help in page
        assert item.flag.help.endswith(".")


def test_a_spelling_belongs_to_one_flag():
    accepted = [name for item in FLAGS for name in (*item.flag.names, *item.flag.off_names)]
    refused = [name for entry in REFUSED for name in entry.names]
    everything = accepted + refused
    assert sorted(set(everything)) == sorted(everything)


# --- values ------------------------------------------------------------------------------------------------------


def test_nothing_given_is_the_default_model():
    assert parse_args([]) == EngineArgs()
    assert parse_args([]).model == "default"


EVERY_FIELD = {
    "model": "m",
    "tokenizer": "t",
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "trust_remote_code": True,
    "revision": "r",
    "download_dir": "d",
    "hf_overrides": {"rope_theta": 5.0},
    "dtype": "float32",
    "kv_cache_dtype": "fp8",
    "quantization": "fp8",
    "max_model_len": 100,
    "max_num_seqs": 3,
    "max_total_tokens": 4096,
    "kv_cache_memory_gb": 1.5,
    "gpu_memory_utilization": 0.5,
    "chunked_prefill_size": 64,
    "prefix_granularity": 32,
    "enable_prefix_caching": False,
    "disable_overlap_schedule": True,
    "enable_mixed_batch": True,
    "disable_kvstore": True,
    "enable_output_logprobs": True,
    "enable_nan_detection": True,
    "enable_cache_report": True,
    "enable_chunked_prefill": True,
    "skip_server_warmup": True,
    "stream_output": True,
    "schedule_policy": "priority",
    "max_queue_len": 5,
    "seed": 6,
    "device": "cpu",
    "num_threads": 1,
    "attention_backend": "paged",
    "moe_backend": "torch",
    "enforce_eager": True,
    "grammar_backend": "none",
    "grammar_compile_timeout_secs": 2.5,
    "disable_any_whitespace": True,
    "cudagraph_capture_sizes": (1, 8),
    "max_cudagraph_capture_size": 8,
    "disable_cuda_graph_padding": True,
    "disable_prefill_graph": True,
    "prefill_graph_max_tokens": 64,
    "prefill_graph_capture_sizes": (16, 64),
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "host": "0.0.0.0",
    "port": 0,
    "served_model_name": ("a", "b"),
    "weight_version": "step-7",
    "api_key": ("k",),
    "cors_allow_origins": ("*",),
    "max_request_mb": 2.0,
    "stream_interval": 4,
    "decode_log_interval": 9,
    "chat_template": "{{ x }}",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen",
    "enable_auto_tool_choice": True,
    "drain_timeout": 1.0,
    "log_level": "debug",
    "enable_log_requests": True,
    "enable_metrics": False,
    "engine_startup_timeout": 20.0,
    "dry_run": True,
}
"""Each field with something else than its default."""


def test_every_field_can_be_set():
    """Each flag reaches its field."""
    values = EVERY_FIELD
    assert set(values) == {field.name for field in dataclasses.fields(EngineArgs)}
    argv: list[str] = []
    for item in FLAGS:
        value = values[item.field_name]
        if item.flag.kind in ("on", "on_or_off"):
            argv.append(item.flag.names[0] if value else item.flag.off_names[0])
            continue
        argv.append(item.flag.names[-1])
        if isinstance(value, tuple):
            argv += map(str, value)
        else:
            argv.append('{"rope_theta": 5.0}' if item.field_name == "hf_overrides" else str(value))
    assert parse_args(argv) == EngineArgs(**values)


@pytest.mark.parametrize(
    "argv",
    [["m"], ["--model", "m"], ["--model=m"], ["--model-path", "m"], ["--port", "8000", "m"], ["--", "m"]],
)
def test_model_spellings(argv):
    assert parse_args(argv) == EngineArgs(model="m")


def test_other_servers_spellings_of_what_is_the_case():
    """vLLM's commands ended with exit code 2 for asking for what happens anyway."""
    assert not parse_args(["--disable-log-requests"]).enable_log_requests
    assert not parse_args(["--enable-log-requests", "--disable-log-requests"]).enable_log_requests
    assert parse_args(["--disable-log-requests", "--enable-log-requests"]).enable_log_requests
    assert parse_args(["--enable-prompt-tokens-details"]).enable_cache_report
    assert parse_args(["--enable-chunked-prefill", "--chunked-prefill-size", "64"]).chunked_prefill_size == 64


@pytest.mark.parametrize("name", ["--prefix-granularity", "--block-size"])
def test_aliases_fill_one_field(name):
    assert parse_args([name, "32"]).prefix_granularity == 32


def test_minus_one_turns_chunking_off():
    assert parse_args(["--chunked-prefill-size", "-1"]).chunked_prefill_size == -1
    assert "at least 1, or -1" in refusal("--chunked-prefill-size", "0")
    assert "is -2" in refusal("--chunked-prefill-size", "-2")


def test_last_of_an_on_or_off_pair_counts_unless_exclusive():
    assert parse_args(["--enable-metrics", "--no-enable-metrics"]).enable_metrics is False
    assert parse_args(["--no-enable-metrics", "--enable-metrics"]).enable_metrics is True
    assert "not allowed with" in refusal("--enable-prefix-caching", "--no-enable-prefix-caching")


def test_origins_as_json_list():
    assert parse_args(["--allowed-origins", '["http://a", "*"]']).cors_allow_origins == ("http://a", "*")
    assert "JSON list" in refusal("--allowed-origins", "[1]")
    assert "JSON list" in refusal("--allowed-origins", "[")


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["a", "b"], ["one model", "a, b"]),
        (["a", "--model", "b"], ["twice", "'a'", "'b'"]),
        (["--model", ""], ["--model is empty"]),
        (["--api-key", "k", ""], ["--api-key holds an empty value"]),
        (["--api-key", " "], ["--api-key holds an empty value"]),
        (["--served-model-name", ""], ["--served-model-name holds an empty value"]),
        (["--port", "x"], ["--port", "integer", "'x'"]),
        (["--port", "65536"], ["--port is 65536", "between 0 and 65535"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--hf-overrides", "[1]"], ["--hf-overrides", "JSON object"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "JSON object"]),
        (["--drain-timeout", "nan"], ["--drain-timeout is nan", "between"]),
        (["--kv-cache-memory-gb", "inf"], ["--kv-cache-memory-gb is inf"]),
        (["--max-model-len", "1"], ["--max-model-len is 1", "at least 2"]),
        (["--schedule-policy", "lifo"], ["'lifo'", "fifo, priority", "did you mean fifo?"]),
        (["--device", "rocm"], ["--device rocm", "AMD GPUs", "auto, cpu, cuda"]),
        (["--cudagraph-capture-sizes", "8", "0"], ["--cudagraph-capture-sizes is 0", "at least 1"]),
        (["--gpu-memory-utilization", "88"], ["--gpu-memory-utilization is 88", "between 0.01 and 1"]),
        (["--load-format", "pt"], ["pickle", "safetensors"]),
        (["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype fp8_e5m2", "mantissa", "auto, fp8"]),
        (["--tp", "2"], ["--tensor-parallel-size is 2", "not built yet", "use 1"]),
        (["--data-parallel-size", "2"], ["--data-parallel-size is 2"]),
        (["--ep-size", "2"], ["--expert-parallel-size is 2"]),
        (["--max-num-batched-tokens", "8192"], ["--max-num-batched-tokens", "--chunked-prefill-size"]),
        (["--max-num-batched-tokens=8192"], ["known flag --max-num-batched-tokens (", "--chunked-prefill-size"]),
        (["--mem-fraction-static", "0.9"], ["--gpu-memory-utilization"]),
        (["--no-enable-chunked-prefill"], ["known flag --no-enable-chunked-prefill", "-1"]),
        (["--enable-chunked-prefill", "--chunked-prefill-size", "-1"], ["contradicts --chunked-prefill-size -1"]),
        (["--swap-space", "4"], ["recomputed"]),
        (["--speculative-config", "{}"], ["speculative decoding is not built yet"]),
        (["--tokenizer-cache-enable-l0"], ["gateway tokenizer cache"]),
        (["-q", "nvfp4"], ["--quantization nvfp4", "not built yet", "fp8, w8a8_fp8"]),
        (["--max_model_len", "5"], ["unknown flag --max_model_len", "did you mean --max-model-len?"]),
        (["--max-model-length", "5"], ["did you mean --max-model-len?"]),
        (["--speculative-num-step", "5"], ["--speculative-num-steps is known but not available"]),
        (["--zzz"], ["unknown flag --zzz", "--help"]),
        (["--max-model", "5"], ["unknown flag --max-model"]),  # no abbreviations
    ],
)
def test_refused_with_reason(argv, parts):
    message = refusal(*argv)
    for part in parts:
        assert part in message, message


def test_a_refused_flag_wins_over_other_errors():
    """Whoever carries a long command over hears of the missing feature first, not of a missing value."""
    assert "speculative" in refusal("--port", "x", "--speculative-num-steps", "3")


def test_after_a_separator_words_are_not_flags():
    assert parse_args(["--", "--speculative-config"]).model == "--speculative-config"


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.names[0])
def test_every_refused_flag_explains_itself(entry):
    for name in entry.names:
        message = refusal(name, "1")
        assert name in message and entry.what in message and entry.instead in message
    accepted = {name for item in FLAGS for name in (*item.flag.names, *item.flag.off_names)}
    for word in entry.instead.replace(",", " ").replace("`", " ").replace(";", " ").split():
        if word.startswith("--"):
            assert word in accepted, f"the remedy for {entry.names[0]} names {word}, which does not exist"


def test_no_twin_of_a_refused_flag_is_found():
    assert find_refusal("--no-tokenizer-mode") is find_refusal("--tokenizer-mode")
    assert find_refusal("--no-such-thing") is None


def test_arguments_made_in_python_meet_the_same_limits():
    with pytest.raises(ConfigError, match="--max-num-seqs is 0"):
        EngineArgs(max_num_seqs=0)
    with pytest.raises(ConfigError, match="--dtype"):
        EngineArgs(dtype="int8")


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as left:
        parse_args(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for item in FLAGS:
        assert item.flag.names[0] in text
