"""`EngineArgs`: what a user can ask for, one documented field a flag. Names and defaults follow the public contract.

The parser, `docs/configuration/server.md` and the freeze test (`tests/config/flags.txt`) are made from the fields
below; adding a flag is adding a field. Here are wishes only: what a machine and a model make of them is decided by
`resolve`. Flags that do not exist yet live in `refused`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.config.flags import check, declared_flags, flag, parse_flags
from tokenspeed.protocol.errors import ConfigError

DEFAULT_MODEL = "default"

MODEL = "Model"
PRECISION = "Precision"
MEMORY = "Memory and scheduling"
DEVICE = "Device and kernels"
PARALLEL = "Parallelism"
API = "HTTP API"
LOGS = "Logs and start"

_NO_RANKS = "parallelism over several ranks is not built yet"
_NO_FP8 = "a KV cache of another precision than the activations is not built yet"
_NO_GPU_KERNELS = "its kernels need a GPU, and the CUDA engine is not built yet"
_NO_MLA = "multi-head latent attention models are not served yet"


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


# argparse names the function in "invalid ... value".
_integer.__name__, _number.__name__, _json_object.__name__ = "integer", "number", "JSON object"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The user's wishes. None means "choose for me"; `resolve` chooses and says why.

    Raises:
        ConfigError: on construction, for a value outside a flag's choices or limits.
    """

    # --- model -----------------------------------------------------------------------------------------------------
    model: str = flag(
        DEFAULT_MODEL,
        "--model --model-path",
        MODEL,
        "Model to serve: a folder, a .gguf file or a hub id. May also be the positional argument, not both.",
        metavar="MODEL",
        default_text="`default`, the embedded SmolLM2-135M-Instruct",
    )
    tokenizer: str | None = flag(
        None,
        "--tokenizer",
        MODEL,
        "Folder, .gguf file or hub id to take the tokenizer and chat template from.",
        metavar="MODEL",
        default_text="the model's own",
    )
    skip_tokenizer_init: bool = flag(
        False,
        "--skip-tokenizer-init",
        MODEL,
        "Load no tokenizer. Prompts are token ids, and answers hold ids (`return_token_ids`) but no text.",
        kind="on",
    )
    load_format: str = flag(
        "auto",
        "--load-format",
        MODEL,
        "Format of the weights. `auto` takes what lies there; `dummy` makes random weights from config.json.",
        choices=("auto", "safetensors", "gguf", "dummy"),
        refused_choices={
            "pt": "PyTorch pickles can run code when opened; convert the model to safetensors",
            "npcache": "convert the model to safetensors",
            "instanttensor": "safetensors files are streamed already",
            "extensible": "external loaders are not supported",
        },
    )
    trust_remote_code: bool = flag(
        False,
        "--trust-remote-code",
        MODEL,
        "Run the Python code that some tokenizers come with. Model code is always our own, never the repository's.",
        kind="on_or_off",
    )
    revision: str | None = flag(
        None,
        "--revision",
        MODEL,
        "Branch, tag or commit of a hub id.",
        metavar="REVISION",
        default_text="the repository's main branch",
    )
    download_dir: str | None = flag(
        None,
        "--download-dir",
        MODEL,
        "Folder that downloads are kept in.",
        metavar="FOLDER",
        default_text="the hub's cache, and the user's cache folder for the embedded model",
    )
    hf_overrides: dict[str, Any] | None = flag(
        None,
        "--hf-overrides",
        MODEL,
        "JSON object laid over the model's config.json, nested objects included.",
        parse=_json_object,
        metavar="JSON",
    )

    # --- precision -------------------------------------------------------------------------------------------------
    dtype: str = flag(
        "auto",
        "--dtype",
        PRECISION,
        "Precision of activations. `half` is float16, `float` is float32. float16 is refused on a CPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "--kv-cache-dtype",
        PRECISION,
        "Precision of the KV cache. `auto` is that of the activations.",
        choices=("auto",),
        refused_choices={name: _NO_FP8 for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "bfloat16", "float16")},
    )

    # --- memory and scheduling -------------------------------------------------------------------------------------
    max_model_len: int | None = flag(
        None,
        "--max-model-len",
        MEMORY,
        "Longest sequence, prompt and output together, in tokens.",
        parse=_integer,
        metavar="TOKENS",
        at_least=2,
        default_text="the model's context, or what the KV cache holds if that is less",
    )
    max_num_seqs: int = flag(
        160,
        "--max-num-seqs",
        MEMORY,
        "Sequences that run at once; others wait.",
        parse=_integer,
        metavar="N",
        at_least=1,
        at_most=4096,
    )
    max_total_tokens: int | None = flag(
        None,
        "--max-total-tokens",
        MEMORY,
        "Tokens that the KV cache holds, rounded down to whole pages. Not together with `--kv-cache-memory-gb`.",
        parse=_integer,
        metavar="TOKENS",
        at_least=2,
        default_text="by memory",
    )
    kv_cache_memory_gb: float | None = flag(
        None,
        "--kv-cache-memory-gb",
        MEMORY,
        "Memory of the KV cache in GiB.",
        parse=_number,
        metavar="GIB",
        at_least=0.001,
        at_most=2**16,
        default_text="25 % of the memory available at start, at most 4 GiB",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "--chunked-prefill-size",
        MEMORY,
        "Token budget of one step, shared by decode and prompt tokens; a longer prompt is computed in chunks. "
        "-1 turns chunking off: the budget is then `--max-model-len`.",
        parse=_integer,
        metavar="TOKENS",
        at_least=1,
        special=(-1,),
        default_text="512 on a CPU",
    )
    prefix_granularity: int | None = flag(
        None,
        "--prefix-granularity --block-size",
        MEMORY,
        "Tokens a page of the KV cache; prefixes are shared in whole pages.",
        parse=_integer,
        metavar="TOKENS",
        at_least=1,
        at_most=1024,
        default_text="16 on a CPU",
    )
    enable_prefix_caching: bool = flag(
        True,
        "--enable-prefix-caching",
        MEMORY,
        "Reuse the KV cache of prompt prefixes seen before.",
        kind="on_or_off",
        is_exclusive=True,
    )
    disable_overlap_schedule: bool = flag(
        False,
        "--disable-overlap-schedule",
        MEMORY,
        "Plan a step only after the one before has ended. Same results, slower; for finding faults.",
        kind="on",
    )
    enable_mixed_batch: bool = flag(
        False,
        "--enable-mixed-batch",
        MEMORY,
        "Prompt and decode tokens in the same step. Always the case here; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
    )
    disable_kvstore: bool = flag(
        False,
        "--disable-kvstore",
        MEMORY,
        "No host KV store. There is none in this version; accepted so that commands carry over.",
        kind="on",
        default_text="always off",
    )
    schedule_policy: str = flag(
        "fifo",
        "--schedule-policy",
        MEMORY,
        "Order of waiting requests: by arrival, or by the request's `priority` (lower first), then arrival.",
        choices=("fifo", "priority"),
    )
    max_queue_len: int = flag(
        1024,
        "--max-queue-len",
        MEMORY,
        "Requests that may wait; more are answered 429 with Retry-After.",
        parse=_integer,
        metavar="N",
        at_least=1,
    )
    seed: int | None = flag(
        None,
        "--seed",
        MEMORY,
        "Seed of dummy weights and of requests that bring none.",
        parse=_integer,
        metavar="N",
        at_least=0,
        at_most=2**63 - 1,
        default_text="drawn at start",
    )

    # --- device and kernels ----------------------------------------------------------------------------------------
    device: str = flag(
        "auto",
        "--device",
        DEVICE,
        "Where the model runs.",
        choices=("auto", "cpu"),
        refused_choices={"cuda": "the CUDA engine is not built yet", "rocm": "AMD GPUs are not supported yet"},
    )
    num_threads: int | None = flag(
        None,
        "--num-threads",
        DEVICE,
        "CPU threads that compute the model.",
        parse=_integer,
        metavar="N",
        at_least=1,
        at_most=1024,
        default_text="physical cores that this process may use",
    )
    attention_backend: str = flag(
        "auto",
        "--attention-backend",
        DEVICE,
        "Attention kernels. `paged` runs on every device; `auto` takes the best that can serve the model.",
        choices=("auto", "paged"),
        refused_choices={
            **{name: _NO_GPU_KERNELS for name in ("mha", "fa3", "fa4", "triton", "flashinfer", "trtllm")},
            **{name: _NO_MLA for name in ("mla", "trtllm_mla", "flashmla", "tokenspeed_mla")},
            "hybrid_linear_attn": "hybrid linear-attention models are not served yet",
        },
    )
    enforce_eager: bool = flag(
        False, "--enforce-eager", DEVICE, "Do not record steps; run operation by operation.", kind="on"
    )

    # --- parallelism -----------------------------------------------------------------------------------------------
    tensor_parallel_size: int = flag(
        1,
        "--tensor-parallel-size --tp",
        PARALLEL,
        "Ranks that share each layer. Only 1 in this version.",
        parse=_integer,
        metavar="N",
        at_least=1,
    )
    data_parallel_size: int = flag(
        1,
        "--data-parallel-size",
        PARALLEL,
        "Replicas of the model. Only 1 in this version.",
        parse=_integer,
        metavar="N",
        at_least=1,
    )
    expert_parallel_size: int = flag(
        1,
        "--expert-parallel-size --ep-size",
        PARALLEL,
        "Ranks that the experts are spread over. Only 1 in this version.",
        parse=_integer,
        metavar="N",
        at_least=1,
    )

    # --- HTTP API --------------------------------------------------------------------------------------------------
    host: str = flag("127.0.0.1", "--host", API, "Address to listen on; 0.0.0.0 for every network.", metavar="ADDRESS")
    port: int = flag(
        8000,
        "--port",
        API,
        "Port to listen on; 0 takes a free one and prints it.",
        parse=_integer,
        metavar="PORT",
        at_least=0,
        at_most=65535,
    )
    served_model_name: tuple[str, ...] = flag(
        (),
        "--served-model-name",
        API,
        "Names that requests may use in `model`; the first is the one answered with.",
        kind="values",
        metavar="NAME",
        default_text="the model as typed",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "--api-key",
        API,
        "Keys accepted as `Authorization: Bearer KEY`.",
        kind="values",
        metavar="KEY",
        is_secret=True,
        default_text="no authentication",
    )
    cors_allow_origins: tuple[str, ...] = flag(
        (),
        "--cors-allow-origins --allowed-origins",
        API,
        "Web origins that may call the API from a browser; `*` for all. A JSON list is accepted too.",
        kind="values",
        metavar="ORIGIN",
    )
    max_request_mb: float = flag(
        32.0,
        "--max-request-mb",
        API,
        "Largest request body in MiB; larger ones are answered 413.",
        parse=_number,
        metavar="MIB",
        at_least=0.001,
        at_most=4096,
    )
    stream_interval: int = flag(
        1,
        "--stream-interval",
        API,
        "Tokens that a streamed event carries at least, the last one excepted.",
        parse=_integer,
        metavar="TOKENS",
        at_least=1,
    )
    chat_template: str | None = flag(
        None,
        "--chat-template",
        API,
        "File with a Jinja chat template, or the template itself.",
        metavar="FILE",
        default_text="the model's own",
    )
    drain_timeout: float = flag(
        30.0,
        "--drain-timeout",
        API,
        "Seconds after SIGTERM in which running requests may finish.",
        parse=_number,
        metavar="SECONDS",
        at_least=0,
        at_most=86400,
    )

    # --- logs and start --------------------------------------------------------------------------------------------
    log_level: str = flag(
        "info", "--log-level", LOGS, "What is logged at least.", choices=("debug", "info", "warning", "warn", "error")
    )
    enable_log_requests: bool = flag(
        False, "--enable-log-requests", LOGS, "One log line a request (without its text).", kind="on_or_off"
    )
    enable_metrics: bool = flag(
        True, "--enable-metrics", LOGS, "Serve Prometheus metrics at `/metrics`.", kind="on_or_off"
    )
    engine_startup_timeout: float = flag(
        1800.0,
        "--engine-startup-timeout",
        LOGS,
        "Seconds that loading the model may take.",
        parse=_number,
        metavar="SECONDS",
        at_least=1,
        at_most=10**6,
    )
    dry_run: bool = flag(
        False,
        "--dry-run",
        LOGS,
        "Print the resolved configuration with the reason of each choice, and leave.",
        kind="on",
    )

    def __post_init__(self) -> None:
        for declared in FLAGS:
            check(declared, getattr(self, declared.field_name))
        for name in ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size"):
            if getattr(self, name) != 1:
                spelled = "--" + name.replace("_", "-")
                raise ConfigError(f"{spelled} is {getattr(self, name)}: {_NO_RANKS}; use 1 or leave the flag out")
        for name in ("model", "tokenizer", "host"):
            if getattr(self, name) == "":
                raise ConfigError(f"--{name} is empty; give a value or leave the flag out")


FLAGS = declared_flags(EngineArgs)
"""All flags, in order of declaration."""


def parse_args(argv: Sequence[str], prog: str = "tokenspeed serve") -> EngineArgs:
    """The command line after the subcommand, checked.

    Raises:
        ConfigError: with a message for the user.
        SystemExit: after `--help`.
    """
    values, positionals = parse_flags(FLAGS, argv, prog)
    if len(positionals) > 1:
        raise ConfigError(f"one model can be served, but {len(positionals)} were given: {', '.join(positionals)}")
    if positionals and "model" in values:
        raise ConfigError(
            f"the model was given twice, as {positionals[0]!r} and as --model {values['model']!r}; give it once"
        )
    if positionals:
        values["model"] = positionals[0]
    for name in ("served_model_name", "api_key", "cors_allow_origins"):
        if name in values:
            values[name] = tuple(values[name])
    if "cors_allow_origins" in values:
        values["cors_allow_origins"] = _origins(values["cors_allow_origins"])
    return EngineArgs(**values)


def _origins(words: tuple[str, ...]) -> tuple[str, ...]:
    """A JSON list in one word (`'["*"]'`, as typed for vLLM) or the origins themselves."""
    if len(words) != 1 or not words[0].startswith("["):
        return words
    try:
        origins = json.loads(words[0])
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ConfigError(f"--cors-allow-origins is {words[0]!r}, it must be a JSON list of strings or plain origins")
    return tuple(origins)
