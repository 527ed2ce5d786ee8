"""resolve: pure, frozen, every automatic choice with a reason, every impossible wish refused."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import DeviceInfo
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.kv_size import kv_bytes_per_token, kv_capacity
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.config.resolve import resolve
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30

CHECKPOINT = Checkpoint(
    name="org/m", format="gguf", config_path="/m.gguf", weight_files=("/m.gguf",), tokenizer_path="/m.gguf"
)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    dtype="bfloat16",
    qtype="Q4_1",
)
AMX = DeviceInfo(
    num_cores=4,
    num_physical_cores=2,
    memory_total_bytes=24 * GIB,
    memory_available_bytes=20 * GIB,
    cpu_flags=frozenset({"avx512f", "avx512_bf16", "amx_bf16"}),
)
OLD_CPU = msgspec.structs.replace(AMX, cpu_flags=frozenset({"avx2"}))
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, head_dim, bfloat16


def engine(args=None, model=MODEL, device=AMX, checkpoint=CHECKPOINT, **about) -> EngineConfig:
    return resolve(args or EngineArgs(), checkpoint, model, device, **about)[0]


def reason(config: EngineConfig, name: str) -> str:
    (choice,) = [choice for choice in config.choices if choice.name == name]
    return f"{choice.value}: {choice.reason}"


def refused(args: EngineArgs, **about) -> str:
    with pytest.raises(ConfigError) as raised:
        engine(args, **about)
    return str(raised.value)


def test_the_defaults_of_a_small_machine():
    config = engine(drawn_seed=7)
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cpu", "bfloat16", "bfloat16")
    assert (config.load_format, config.page_size, config.max_num_batched_tokens) == ("gguf", 16, 512)
    assert (config.max_model_len, config.max_num_seqs, config.num_threads) == (8192, 160, 2)
    assert (config.num_pages, config.kv_memory_bytes) == (None, 4 * GIB)
    assert config.enable_prefix_caching and config.enable_overlap and not config.enforce_eager
    assert config.seed == 7
    assert {choice.name for choice in config.choices} == {
        "--load-format",
        "--device",
        "--dtype",
        "--kv-cache-dtype",
        "--prefix-granularity",
        "--kv-cache-memory-gb",
        "--max-model-len",
        "--chunked-prefill-size",
        "--num-threads",
        "--seed",
    }
    assert all(choice.value and choice.reason for choice in config.choices)


def test_what_is_given_is_kept_and_not_called_a_choice():
    args = EngineArgs(
        load_format="gguf",
        device="cpu",
        dtype="float",
        prefix_granularity=32,
        kv_cache_memory_gb=1,
        max_model_len=100,
        chunked_prefill_size=64,
        num_threads=3,
        seed=5,
        max_num_seqs=9,
        schedule_policy="priority",
        disable_overlap_schedule=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_queue_len=3,
    )
    config = engine(args, drawn_seed=99)
    assert [choice.name for choice in config.choices] == ["--kv-cache-dtype"]
    assert (config.dtype, config.page_size, config.kv_memory_bytes) == ("float32", 32, GIB)
    assert (config.max_model_len, config.max_num_batched_tokens, config.num_threads, config.seed) == (100, 64, 3, 5)
    assert (config.max_num_seqs, config.schedule_policy, config.max_queue_len) == (9, "priority", 3)
    assert (config.enable_overlap, config.enable_prefix_caching, config.enforce_eager) == (False, False, True)


def test_equal_arguments_give_equal_results():
    assert resolve(EngineArgs(), CHECKPOINT, MODEL, AMX) == resolve(EngineArgs(), CHECKPOINT, MODEL, AMX)


def test_the_result_is_frozen_and_crosses_a_process_border():
    config = engine()
    with pytest.raises(AttributeError):
        config.seed = 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


# --- precision ---------------------------------------------------------------------------------------------------


def test_dtype_follows_checkpoint_and_cpu():
    assert "amx_bf16, avx512_bf16" in reason(engine(), "--dtype")
    assert engine(device=OLD_CPU).dtype == "float32"
    assert "no bfloat16 units" in reason(engine(device=OLD_CPU), "--dtype")
    plain = msgspec.structs.replace(MODEL, qtype=None, dtype="float32")
    assert engine(model=plain).dtype == "float32"
    assert engine(model=msgspec.structs.replace(plain, dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize("spelling", ["half", "float16"])
def test_float16_is_refused_on_a_cpu(spelling):
    message = refused(EngineArgs(dtype=spelling))
    assert spelling in message and "--dtype bfloat16" in message


# --- memory and lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "chunk", "tokens"),
    [
        ((None, None), 64, 100 * 16),
        ((128, None), 64, (200 - 13) * 16),  # 128 - 1 + 64 tokens touch at most 13 pages
        ((128, None), -1, 100 * 16),
        ((128, None), 4096, 100 * 16),
        ((128, 128), 64, MODEL.max_position),
        ((128, 128), 4096, 200 * 16),
    ],
)
def test_capacity_with_sliding_windows(windows, chunk, tokens):
    """Layers with a window have pages of their own, half as large here as those of both layers together."""
    model = msgspec.structs.replace(MODEL, num_layers=2, layer_windows=windows)
    layer_bytes = 2 * model.num_kv_heads * model.head_dim * 2
    token_bytes = kv_bytes_per_token(model, "bfloat16")
    assert token_bytes == layer_bytes * (1 if windows == (128, None) else 2)
    memory = 200 * 16 * layer_bytes if windows == (128, None) else 100 * 16 * 2 * layer_bytes
    if windows == (128, 128):
        memory *= 2
    assert kv_capacity(model, None, memory, 16, token_bytes, chunk) == tokens
    assert kv_capacity(model, 7, None, 16, token_bytes, chunk) == 7 * 16
    assert kv_capacity(model, None, None, 16, token_bytes, chunk) is None


def test_kv_bytes_per_token():
    assert kv_bytes_per_token(MODEL, "bfloat16") == TOKEN_BYTES
    assert kv_bytes_per_token(MODEL, "float32") == 2 * TOKEN_BYTES


def test_kv_memory_is_a_share_of_what_is_available():
    config = engine(device=msgspec.structs.replace(AMX, memory_available_bytes=2 * GIB))
    assert config.kv_memory_bytes == GIB // 2
    assert "25 % of 2.0 GiB" in reason(config, "--kv-cache-memory-gb")
    assert "at most" in reason(engine(), "--kv-cache-memory-gb")


def test_context_is_lowered_to_what_the_pool_holds():
    config = engine(EngineArgs(kv_cache_memory_gb=100 * TOKEN_BYTES / GIB, prefix_granularity=16))
    assert config.max_model_len == 96  # six whole pages of 16
    assert "8192" in reason(config, "--max-model-len")


def test_total_tokens_make_whole_pages():
    config = engine(EngineArgs(max_total_tokens=100, prefix_granularity=16))
    assert (config.num_pages, config.kv_memory_bytes, config.max_model_len) == (6, None, 96)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (EngineArgs(max_model_len=8193), ["8193", "8192", "TOKENSPEED_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"]),
        (EngineArgs(max_model_len=200, max_total_tokens=100), ["200", "96 tokens", "lower it to 96"]),
        (EngineArgs(max_total_tokens=100, kv_cache_memory_gb=1), ["give one of them"]),
        (EngineArgs(max_total_tokens=10), ["10", "one page of 16"]),
        (EngineArgs(max_total_tokens=2, prefix_granularity=2, max_model_len=3), ["3", "2 tokens"]),
        (EngineArgs(kv_cache_memory_gb=21), ["21", "20.0 GiB"]),
        # The bug: a traceback with torch's words about an allocation.
        (
            EngineArgs(max_total_tokens=10**14),
            [f"{TOKEN_BYTES} bytes a token", "20.0 GiB", "lower it"],
        ),
        (EngineArgs(num_threads=5), ["5", "4 cores"]),
        (EngineArgs(load_format="safetensors"), ["safetensors", "--load-format gguf"]),
    ],
)
def test_impossible_wishes_name_value_limit_and_remedy(args, parts):
    message = refused(args)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ({"max_total_tokens": 100}, "--max-total-tokens"),
        ({"kv_cache_memory_gb": 100 * TOKEN_BYTES / GIB}, "--kv-cache-memory-gb"),
    ],
)
def test_the_flag_that_sized_the_pool_is_the_one_to_raise(args, flag):
    """Regression: the other one was named too, or alone, and both together are refused."""
    message = refused(EngineArgs(max_model_len=200, prefix_granularity=4, **args))
    assert message.endswith(f"lower it to 100, or raise {flag}"), message


def test_a_pool_without_room_for_two_tokens_is_refused():
    tiny = msgspec.structs.replace(AMX, memory_available_bytes=4 * TOKEN_BYTES)
    message = refused(EngineArgs(), device=tiny)
    assert "0 tokens" in message and message.endswith("raise --kv-cache-memory-gb"), message


def test_longer_context_when_permitted():
    assert engine(EngineArgs(max_model_len=9000), allow_longer_context=True).max_model_len == 9000


def test_chunking_off_is_a_budget_of_the_whole_context():
    config = engine(EngineArgs(chunked_prefill_size=-1, max_model_len=1000))
    assert config.max_num_batched_tokens == 1000
    assert "never split" in reason(config, "token budget of a step")


# --- files and flags without effect ------------------------------------------------------------------------------


def test_a_config_without_weights_needs_dummy():
    bare = msgspec.structs.replace(CHECKPOINT, format="config", weight_files=())
    assert "--load-format dummy" in refused(EngineArgs(), checkpoint=bare)
    assert engine(EngineArgs(load_format="dummy"), checkpoint=bare).load_format == "dummy"
    assert engine(EngineArgs(load_format="dummy")).load_format == "dummy"


@pytest.mark.parametrize(
    "name",
    [
        "enable_mixed_batch", "disable_kvstore", "enable_output_logprobs", "enable_nan_detection",
        "enable_cache_report", "skip_server_warmup", "stream_output", "enable_chunked_prefill",
    ],
)  # fmt: skip
def test_flags_without_effect_are_said(name):
    spelled = "--" + name.replace("_", "-")
    assert spelled not in {choice.name for choice in engine().choices}
    assert reason(engine(EngineArgs(**{name: True})), spelled)


def test_mha_is_left_to_selection():
    config = engine(EngineArgs(attention_backend="mha"))
    assert config.attention_backend == "auto"
    assert reason(config, "--attention-backend").startswith("auto: mha names no kernels")


@pytest.mark.parametrize("name", ["triton", "mla", "pagde"])
def test_attention_that_cannot_run_names_what_would(name):
    assert refused(EngineArgs(attention_backend=name)).endswith("use one of: auto, paged")


# --- server ------------------------------------------------------------------------------------------------------


def test_server_configuration():
    args = EngineArgs(
        host="0.0.0.0",
        port=0,
        served_model_name=("a", "b"),
        api_key=("k",),
        cors_allow_origins=("*",),
        max_request_mb=0.5,
        drain_timeout=2,
        chat_template="{{ x }}",
        reasoning_parser="qwen3",
        tool_call_parser="qwen",
        stream_interval=3,
        enable_metrics=False,
        enable_log_requests=True,
        log_level="warn",
    )
    _, server = resolve(args, CHECKPOINT, MODEL, AMX)
    assert (server.host, server.port, server.served_model_names, server.api_keys) == ("0.0.0.0", 0, ("a", "b"), ("k",))
    assert (server.cors_allow_origins, server.max_request_bytes, server.drain_timeout_s) == (("*",), 2**19, 2)
    assert (server.chat_template, server.stream_interval, server.enable_metrics) == ("{{ x }}", 3, False)
    assert (server.reasoning_parser, server.tool_call_parser) == ("qwen3", "qwen")
    assert (server.log_requests, server.log_level, server.allow_priority) == (True, "warning", False)


def test_priority_is_taken_only_under_its_policy():
    _, server = resolve(EngineArgs(schedule_policy="priority"), CHECKPOINT, MODEL, AMX)
    assert server.allow_priority


def test_the_served_name_is_the_model_as_typed():
    _, server = resolve(EngineArgs(), CHECKPOINT, MODEL, AMX)
    assert server.served_model_names == ("org/m",)


def test_no_wish_is_ignored():
    """Every flag changes the result, except those that act before resolve (finding and reading files, ending early)."""
    acts_elsewhere = {
        "model", "tokenizer", "revision", "download_dir", "hf_overrides", "engine_startup_timeout", "dry_run",
        "gpu_memory_utilization", "cudagraph_capture_sizes", "max_cudagraph_capture_size",  # see test_resolve_gpu.py
        "disable_cuda_graph_padding", "disable_prefill_graph", "prefill_graph_max_tokens",
        "prefill_graph_capture_sizes",
        "quantization",  # see test_precision_choices.py
        "moe_backend",  # see tests/moe/test_select_moe.py
        "tensor_parallel_size", "data_parallel_size", "expert_parallel_size",  # one value only
    }  # fmt: skip
    other = {
        "load_format": "dummy", "trust_remote_code": True, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2,
        "max_total_tokens": 9000, "kv_cache_memory_gb": 1.0, "chunked_prefill_size": 8, "prefix_granularity": 8,
        "enable_prefix_caching": False, "disable_overlap_schedule": True, "enable_mixed_batch": True,
        "disable_kvstore": True, "schedule_policy": "priority", "max_queue_len": 2, "seed": 3, "device": "cpu",
        "num_threads": 1, "attention_backend": "paged", "enforce_eager": True, "host": "h", "port": 1,
        "served_model_name": ("x",), "weight_version": "x", "api_key": ("x",), "cors_allow_origins": ("x",),
        "max_request_mb": 1.0,
        "stream_interval": 2, "chat_template": "{{ x }}", "drain_timeout": 1.0, "log_level": "error",
        "enable_log_requests": True, "enable_metrics": False, "skip_tokenizer_init": True, "decode_log_interval": 5,
        "kv_cache_dtype": "fp8", "reasoning_parser": "qwen3", "tool_call_parser": "qwen",
        "enable_auto_tool_choice": True, "enable_output_logprobs": True, "enable_nan_detection": True,
        "enable_cache_report": True, "skip_server_warmup": True, "stream_output": True, "enable_chunked_prefill": True,
        "grammar_backend": "none", "grammar_compile_timeout_secs": 1.0, "disable_any_whitespace": True,
    }  # fmt: skip
    assert set(other) | acts_elsewhere == {field.name for field in dataclasses.fields(EngineArgs)}
    default = resolve(EngineArgs(), CHECKPOINT, MODEL, AMX)
    for name, value in other.items():
        assert resolve(EngineArgs(**{name: value}), CHECKPOINT, MODEL, AMX) != default, name


@pytest.mark.parametrize("other", [{"tokenizer": "t"}, {"chat_template": "{{ x }}"}])
def test_no_tokenizer_and_something_made_of_text_contradict(other):
    (name,) = other
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} was given together with --skip-tokenizer-init"):
        resolve(EngineArgs(skip_tokenizer_init=True, **other), CHECKPOINT, MODEL, AMX)
