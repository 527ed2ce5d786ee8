"""From wishes to a configuration: what the model and the machine make of `EngineArgs`.

Pure: no files, no clock, no environment, no randomness; equal arguments give equal results. Every value that the user
left open becomes a `Choice` with its reason. Whatever cannot work is refused here, before any memory is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config import attention_choices, moe_choices
from tokenspeed.config.args import FLAGS, EngineArgs
from tokenspeed.config.device import DeviceInfo
from tokenspeed.config.engine import Choice, EngineConfig
from tokenspeed.config.gpu_choices import capture_sizes, memory_utilization, prefill_sizes, usable_gpu, why_no_e4m3
from tokenspeed.config.kv_size import kv_bytes_per_token, kv_capacity, kv_size
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.precision_choices import check_quantizing, kv_dtype, quantize_on_load
from tokenspeed.config.server import ServerConfig
from tokenspeed.protocol.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
Kind = Literal["cpu", "cuda"]

LONGER_CONTEXT_VARIABLE = "TOKENSPEED_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"

_DTYPES: dict[str, Dtype] = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_GRAMMARS: dict[str, Literal["auto", "xgrammar", "llguidance", "none"]] = {
    "auto": "auto",
    "xgrammar": "xgrammar",
    "llguidance": "llguidance",
    "none": "none",
}
_LOG_LEVELS: dict[str, Literal["debug", "info", "warning", "error"]] = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "warn": "warning",
    "error": "error",
}


@dataclass(frozen=True, slots=True)
class _Usual:
    """What a kind of device usually takes, with reasons."""

    page_tokens: int
    page_reason: str
    chunk_tokens: int
    chunk_reason: str


_USUAL: dict[Kind, _Usual] = {
    "cpu": _Usual(
        16,
        "short pages share more of a prefix and leave less room unused at the end of a sequence",
        512,
        "enough rows for the matrix units of a CPU; in a larger step, running streams wait longer",
    ),
    "cuda": _Usual(
        64,
        "one page is one tile of the attention kernels",
        8192,
        "enough rows for the matrix units of a GPU; in a larger step, running streams wait longer",
    ),
}


def resolve(
    args: EngineArgs,
    checkpoint: Checkpoint,
    model: ModelConfig,
    device: DeviceInfo,
    *,
    drawn_seed: int = 0,
    allow_longer_context: bool = False,
) -> tuple[EngineConfig, ServerConfig]:
    """Decide everything.

    Args:
        args: the wishes. `chat_template` is the template's text, not a file name.
        checkpoint: of the model; its tokenizer_path is already that of `--tokenizer`.
        model: with `--hf-overrides` applied.
        drawn_seed: the seed to use when `--seed` was left open.
        allow_longer_context: permit `--max-model-len` above the model's context (the environment variable
            TOKENSPEED_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN).
    Raises:
        ConfigError: names the value, the limit and the remedy.
    """
    return _engine(args, checkpoint, model, device, drawn_seed, allow_longer_context), _server(args, checkpoint)


def _engine(
    args: EngineArgs,
    checkpoint: Checkpoint,
    model: ModelConfig,
    device: DeviceInfo,
    drawn_seed: int,
    allow_longer_context: bool,
) -> EngineConfig:
    choices: list[Choice] = []
    load_format = _load_format(args, checkpoint, choices)
    kind = _device(args, device, choices)
    _refuse_flags_of_other_devices(args, kind)
    attention_backend = attention_choices.settle(args.attention_backend, kind, choices)
    dtype = _dtype(args, model, device, choices) if kind == "cpu" else _gpu_dtype(args, model, choices)
    quantizes = quantize_on_load(args, model)
    moe_choices.check_dtype(dtype, model.moe is not None, model.quantization, quantizes)
    no_e4m3 = why_no_e4m3(device.gpus[0]) if kind == "cuda" else None
    if kind == "cuda":
        check_quantizing(quantizes, dtype, model.moe is not None, no_e4m3)
    moe_choices.check(args.moe_backend, kind, model.moe is not None)
    kv_cache_dtype = kv_dtype(args, model, dtype, choices, no_e4m3)
    room = _room(args, model, device, kind, kv_cache_dtype, allow_longer_context, choices)
    return EngineConfig(
        model=model,
        checkpoint=checkpoint,
        load_format=load_format,
        device=kind,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantize_on_load=quantizes,
        has_e4m3=no_e4m3 is None,
        max_model_len=room.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=room.step_tokens,
        page_size=room.page_size,
        num_pages=room.num_pages,
        kv_memory_bytes=room.kv_memory_bytes,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_overlap=not args.disable_overlap_schedule,
        enforce_eager=args.enforce_eager,
        schedule_policy="priority" if args.schedule_policy == "priority" else "fifo",
        attention_backend=attention_backend,
        moe_backend=args.moe_backend,
        num_threads=_num_threads(args, device, choices) if kind == "cpu" else device.num_physical_cores,
        gpu_memory_utilization=room.gpu_memory_utilization,
        capture_sizes=capture_sizes(args, choices) if kind == "cuda" else (),
        prefill_sizes=prefill_sizes(args, room.step_tokens, choices) if kind == "cuda" else (),
        pad_graphs=not args.disable_cuda_graph_padding,
        seed=_seed(args, drawn_seed, choices),
        max_queue_len=args.max_queue_len,
        trust_remote_code=args.trust_remote_code,
        skip_tokenizer_init=_skip_tokenizer(args),
        grammar_backend=_GRAMMARS[args.grammar_backend],
        grammar_timeout_s=args.grammar_compile_timeout_secs,
        any_whitespace=not args.disable_any_whitespace,
        decode_log_interval=args.decode_log_interval,
        choices=(*choices, *_without_effect(args)),
    )


def _device(args: EngineArgs, device: DeviceInfo, choices: list[Choice]) -> Kind:
    """
    Raises:
        ConfigError: `--device cuda` without a GPU that will do. Names what is missing.
    """
    if args.device == "cpu":
        return "cpu"
    gpu, about = usable_gpu(device)
    if args.device == "cuda" and gpu is None:
        raise ConfigError(f"--device cuda cannot be had: {about}; remedy that, or use --device cpu")
    kind: Kind = "cpu" if gpu is None else "cuda"
    if args.device == "auto":
        choices.append(Choice("--device", kind, about))
    return kind


def _refuse_flags_of_other_devices(args: EngineArgs, kind: Kind) -> None:
    """
    Raises:
        ConfigError: a flag that means nothing on this kind of device.
    """
    for item in FLAGS:
        only_on = item.flag.only_on
        if only_on is None or only_on == kind or getattr(args, item.field_name) == item.default:
            continue
        here, there = ("on a CPU", "a GPU") if kind == "cpu" else ("on a GPU", "the CPU")
        raise ConfigError(
            f"{item.flag.names[0]} concerns only {there}, and the model runs {here}; leave it out, or use "
            f"--device {only_on}"
        )


def _load_format(
    args: EngineArgs, checkpoint: Checkpoint, choices: list[Choice]
) -> Literal["safetensors", "gguf", "dummy"]:
    found = checkpoint.format
    if args.load_format == "dummy":
        return "dummy"
    if found == "config":
        raise ConfigError(
            f"{checkpoint.name} has a config.json but no weights; add the weights, or serve random ones with "
            "--load-format dummy"
        )
    if args.load_format == "auto":
        choices.append(Choice("--load-format", found, "the files that are there"))
    elif args.load_format != found:
        raise ConfigError(
            f"--load-format is {args.load_format}, but {checkpoint.name} holds {found} files; use --load-format {found}"
        )
    return found


def _dtype(args: EngineArgs, model: ModelConfig, device: DeviceInfo, choices: list[Choice]) -> Dtype:
    if args.dtype != "auto":
        dtype = _DTYPES[args.dtype]
        if dtype == "float16":
            raise ConfigError(
                f"--dtype {args.dtype} is not available on a CPU, which has no fast float16 arithmetic; "
                "use --dtype bfloat16 or --dtype float32"
            )
        return dtype
    units = sorted(flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in device.cpu_flags)
    weights = f"{model.qtype} weights" if model.qtype else f"{model.dtype} weights"
    if model.dtype == "float32" and model.qtype is None:
        dtype, reason = "float32", "the checkpoint is float32"
    elif units:
        dtype, reason = "bfloat16", f"{weights}, and the CPU multiplies bfloat16 ({', '.join(units)})"
    else:
        dtype, reason = "float32", f"{weights}, but the CPU has no bfloat16 units (avx512_bf16, amx_bf16)"
    choices.append(Choice("--dtype", dtype, reason))
    return dtype


def _gpu_dtype(args: EngineArgs, model: ModelConfig, choices: list[Choice]) -> Dtype:
    """The checkpoint's own. A float32 checkpoint stays float32 (the contract's float16 would lose range that nobody
    agreed to lose); the reason says what is faster."""
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    if model.qtype is not None:
        dtype, reason = "bfloat16", f"{model.qtype} weights, dequantized"
    else:
        dtype, reason = model.dtype, f"the checkpoint is {model.dtype}"
    if dtype == "float32":
        reason += "; --dtype bfloat16 halves the bytes and uses the fused kernels"
    choices.append(Choice("--dtype", dtype, reason))
    return _DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class _Room:
    """The KV cache, and what a sequence and a step may take; as in `EngineConfig`; step_tokens: a step's budget."""

    page_size: int
    gpu_memory_utilization: float | None
    num_pages: int | None
    kv_memory_bytes: int | None
    max_model_len: int
    step_tokens: int


def _room(
    args: EngineArgs,
    model: ModelConfig,
    device: DeviceInfo,
    kind: Kind,
    kv_cache_dtype: str,
    allow_longer_context: bool,
    choices: list[Choice],
) -> _Room:
    usual = _USUAL[kind]
    page_size = _page_size(args, usual, choices)
    utilization = memory_utilization(args, choices) if kind == "cuda" else None
    token_bytes = kv_bytes_per_token(model, kv_cache_dtype)
    num_pages, kv_memory_bytes = kv_size(args, device, kind, page_size, token_bytes, choices)
    step_tokens = args.chunked_prefill_size or usual.chunk_tokens
    capacity = kv_capacity(model, num_pages, kv_memory_bytes, page_size, token_bytes, step_tokens)
    max_model_len = _max_model_len(args, model, capacity, token_bytes, allow_longer_context, choices)
    budget = _token_budget(args, usual, max_model_len, choices)
    return _Room(page_size, utilization, num_pages, kv_memory_bytes, max_model_len, budget)


def _page_size(args: EngineArgs, usual: _Usual, choices: list[Choice]) -> int:
    if args.prefix_granularity is not None:
        return args.prefix_granularity
    choices.append(Choice("--prefix-granularity", str(usual.page_tokens), usual.page_reason))
    return usual.page_tokens


def _max_model_len(
    args: EngineArgs,
    model: ModelConfig,
    capacity: int | None,
    token_bytes: int,
    allow_longer_context: bool,
    choices: list[Choice],
) -> int:
    """A sequence of full length must fit into the pool alone, or it could wait forever. Where the pool's size is not
    known yet, the runner checks it."""
    wanted = args.max_model_len
    if wanted is not None and wanted > model.max_position and not allow_longer_context:
        raise ConfigError(
            f"--max-model-len is {wanted}, above the model's context of {model.max_position} tokens; lower it, extend "
            f"the context with --hf-overrides (rope_scaling), or set {LONGER_CONTEXT_VARIABLE}=1 if you accept wrong "
            "text beyond the context"
        )
    sized_by = "--kv-cache-memory-gb" if args.max_total_tokens is None else "--max-total-tokens"
    if capacity is not None and capacity < 2:
        raise ConfigError(f"the KV cache would hold {capacity} tokens ({token_bytes} bytes a token); raise {sized_by}")
    if wanted is not None:
        if capacity is not None and wanted > capacity:
            raise ConfigError(
                f"--max-model-len is {wanted}, but the KV cache holds {capacity} tokens ({token_bytes} bytes a token); "
                f"lower it to {capacity}, or raise {sized_by}"
            )
        return wanted
    if capacity is not None and capacity < model.max_position:
        reason = f"the KV cache holds no more; the model could take {model.max_position}"
        choices.append(Choice("--max-model-len", str(capacity), reason))
        return capacity
    choices.append(Choice("--max-model-len", str(model.max_position), "the model's context"))
    return model.max_position


def _token_budget(args: EngineArgs, usual: _Usual, max_model_len: int, choices: list[Choice]) -> int:
    size = args.chunked_prefill_size
    if size == -1:
        reason = "--chunked-prefill-size -1: a prompt that runs alone is never split"
        choices.append(Choice("token budget of a step", str(max_model_len), reason))
        return max_model_len
    if size is not None:
        return size
    choices.append(Choice("--chunked-prefill-size", str(usual.chunk_tokens), usual.chunk_reason))
    return usual.chunk_tokens


def _skip_tokenizer(args: EngineArgs) -> bool:
    if args.skip_tokenizer_init:
        for name, value in (("--tokenizer", args.tokenizer), ("--chat-template", args.chat_template)):
            if value is not None:
                raise ConfigError(
                    f"{name} was given together with --skip-tokenizer-init, with which no text is made; leave one out"
                )
    return args.skip_tokenizer_init


def _num_threads(args: EngineArgs, device: DeviceInfo, choices: list[Choice]) -> int:
    if args.num_threads is not None:
        if args.num_threads > device.num_cores:
            raise ConfigError(
                f"--num-threads is {args.num_threads}, but this process may use {device.num_cores} cores and "
                "more threads would wait for each other; lower it"
            )
        return args.num_threads
    reason = f"physical cores among the {device.num_cores} this process may use"
    choices.append(Choice("--num-threads", str(device.num_physical_cores), reason))
    return device.num_physical_cores


def _seed(args: EngineArgs, drawn_seed: int, choices: list[Choice]) -> int:
    if args.seed is not None:
        return args.seed
    choices.append(Choice("--seed", str(drawn_seed), "drawn for this start; give it to repeat one"))
    return drawn_seed


_ALWAYS = {
    "enable_mixed_batch": ("--enable-mixed-batch", "on", "prompt and decode tokens always share steps here"),
    "enable_chunked_prefill": ("--enable-chunked-prefill", "on", "off only with --chunked-prefill-size -1"),
    "enable_auto_tool_choice": ("--enable-auto-tool-choice", "on", "without tool_choice the model always decides here"),
    "disable_kvstore": ("--disable-kvstore", "off", "there is no host KV store in this version"),
    "enable_output_logprobs": ("--enable-output-logprobs", "on", "whoever asks for log-probabilities gets them here"),
    "enable_nan_detection": ("--enable-nan-detection", "on", "NaN logits always end only their own request here"),
    "enable_cache_report": ("--enable-cache-report", "on", "usage always tells cached prompt tokens here"),
    "skip_server_warmup": ("--skip-server-warmup", "on", "no request is sent before the ready line here"),
    "stream_output": ("--stream-output", "on", "streams always send disjoint pieces here"),
}
"""By field: what a flag says that asks for the only way there is."""


def _without_effect(args: EngineArgs) -> list[Choice]:
    """Flags that ask for what is the case anyway: said, not swallowed."""
    return [Choice(*choice) for field, choice in _ALWAYS.items() if getattr(args, field)]


def _server(args: EngineArgs, checkpoint: Checkpoint) -> ServerConfig:
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_names=args.served_model_name or (checkpoint.name,),
        weight_version=args.weight_version,
        api_keys=args.api_key,
        cors_allow_origins=args.cors_allow_origins,
        max_request_bytes=int(args.max_request_mb * 2**20),
        drain_timeout_s=args.drain_timeout,
        chat_template=args.chat_template,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        stream_interval=args.stream_interval,
        enable_metrics=args.enable_metrics,
        allow_priority=args.schedule_policy == "priority",
        log_requests=args.enable_log_requests,
        log_level=_LOG_LEVELS[args.log_level],
    )
