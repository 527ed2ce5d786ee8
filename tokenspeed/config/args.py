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

from tokenspeed.config.device_args import DEVICE as DEVICE
from tokenspeed.config.device_args import DeviceArgs
from tokenspeed.config.flags import check, declared_flags, flag, integer, json_object, number, parse_flags
from tokenspeed.config.server_args import API as API
from tokenspeed.config.server_args import LOGS as LOGS
from tokenspeed.protocol.errors import ConfigError

DEFAULT_MODEL = "default"

MODEL = "Model"
PRECISION = "Precision"
MEMORY = "Memory and scheduling"
PARALLEL = "Parallelism"
GROUPS = (MODEL, PRECISION, MEMORY, DEVICE, PARALLEL, API, LOGS)
"""Headings in the order of help and documentation."""

_NO_RANKS = "parallelism over several ranks is not built yet"
_KV_AS_ACTIVATIONS = "auto is the precision of the activations, which --dtype sets"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(DeviceArgs):
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
        kind="on_or_off",
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
        parse=json_object,
        metavar="JSON",
    )

    # --- precision -------------------------------------------------------------------------------------------------
    dtype: str = flag(
        "auto",
        "--dtype",
        PRECISION,
        "Precision of activations. `half` is float16, `float` is float32. float16 needs a GPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "--kv-cache-dtype",
        PRECISION,
        "Precision of the KV cache. `auto` is what the checkpoint was made for, else that of the activations; `fp8` is "
        "`fp8_e4m3`, with the checkpoint's scales if it has some.",
        choices=("auto", "fp8", "fp8_e4m3"),
        refused_choices={
            "fp8_e5m2": "two bits of mantissa lose more than the range gains; fp8_e4m3 has the same size",
            "mxfp8": "its kernels are not built yet; fp8_e4m3 has the same size",
            **{name: _KV_AS_ACTIVATIONS for name in ("bfloat16", "float16")},
        },
    )
    quantization: str | None = flag(
        None,
        "--quantization -q",
        PRECISION,
        "Precision of weights. `fp8` quantizes the layers of an unquantized checkpoint to e4m3 while it loads; for a "
        "quantized one it must name what is there (`w8a8_fp8` and `compressed-tensors` stand for each other).",
        choices=("fp8", "w8a8_fp8", "compressed-tensors", "mxfp4"),
        refused_choices={name: "its kernels are not built yet" for name in ("nvfp4", "mxfp8")},
        default_text="the checkpoint's own",
    )

    # --- memory and scheduling -------------------------------------------------------------------------------------
    max_model_len: int | None = flag(
        None,
        "--max-model-len",
        MEMORY,
        "Longest sequence, prompt and output together, in tokens.",
        parse=integer,
        metavar="TOKENS",
        at_least=2,
        default_text="the model's context; on a CPU what the KV cache holds if that is less",
    )
    max_num_seqs: int = flag(
        160,
        "--max-num-seqs",
        MEMORY,
        "Sequences that run at once; others wait.",
        parse=integer,
        metavar="N",
        at_least=1,
        at_most=4096,
    )
    max_total_tokens: int | None = flag(
        None,
        "--max-total-tokens",
        MEMORY,
        "Tokens that the KV cache holds, rounded down to whole pages; so many in each of the model's cache groups (two "
        "where some layers have a sliding window and some have none), which share the memory. Not together with "
        "`--kv-cache-memory-gb`.",
        parse=integer,
        metavar="TOKENS",
        at_least=2,
        default_text="by memory",
    )
    kv_cache_memory_gb: float | None = flag(
        None,
        "--kv-cache-memory-gb",
        MEMORY,
        "Memory of the KV cache in GiB, on the device.",
        parse=number,
        metavar="GIB",
        at_least=0.001,
        at_most=2**16,
        default_text="on a CPU 25 % of the memory available at start, at most 4 GiB; on a GPU what is left",
    )
    gpu_memory_utilization: float | None = flag(
        None,
        "--gpu-memory-utilization",
        MEMORY,
        "Share of a GPU's memory for weights, activations and KV cache together.",
        parse=number,
        metavar="SHARE",
        at_least=0.01,
        at_most=1,
        default_text="0.88; with 2 ranks 0.87, 4 ranks 0.95, 8 ranks 0.81, 16 ranks 0.79",
        only_on="cuda",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "--chunked-prefill-size",
        MEMORY,
        "Token budget of one step, shared by decode and prompt tokens; a longer prompt is computed in chunks. "
        "-1 turns chunking off: the budget is then `--max-model-len`.",
        parse=integer,
        metavar="TOKENS",
        at_least=1,
        special=(-1,),
        default_text="512 on a CPU, 8192 on a GPU",
    )
    enable_chunked_prefill: bool = flag(
        False,
        "--enable-chunked-prefill",
        MEMORY,
        "Compute long prompts in chunks. The case unless `--chunked-prefill-size` is -1, with which it is refused; "
        "accepted so that commands carry over.",
        kind="on",
        default_text="on, see `--chunked-prefill-size`",
    )
    prefix_granularity: int | None = flag(
        None,
        "--prefix-granularity --block-size",
        MEMORY,
        "Tokens a page of the KV cache; prefixes are shared in whole pages.",
        parse=integer,
        metavar="TOKENS",
        at_least=1,
        at_most=1024,
        default_text="16 on a CPU, 64 on a GPU",
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
        "Prompt and decode tokens in the same step. Always the case here; accepted so that commands carry over. The "
        "decodes of such a step are computed first and apart wherever they have a recorded graph or, on a CPU, kernels "
        "of their own: it reads the weights twice and takes as long as a decode step and a prompt step together.",
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
    enable_output_logprobs: bool = flag(
        False,
        "--enable-output-logprobs",
        API,
        "Log-probabilities of output tokens for requests that ask. Always the case here; accepted so that commands "
        "carry over.",
        kind="on",
        default_text="always on",
    )
    enable_nan_detection: bool = flag(
        False,
        "--enable-nan-detection",
        API,
        "NaN logits end only the request that has them. Always the case here; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
    )
    enable_cache_report: bool = flag(
        False,
        "--enable-cache-report --enable-prompt-tokens-details",
        API,
        "Cached prompt tokens in `usage`. Always the case here; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
    )
    skip_server_warmup: bool = flag(
        False,
        "--skip-server-warmup",
        API,
        "No warm-up request at the start. None is sent here: graphs and kernels are made ready without one, as the "
        "memory that they take has to be known; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
    )
    stream_output: bool = flag(
        False,
        "--stream-output",
        API,
        "Streams send disjoint pieces. Always the case here; accepted so that commands carry over.",
        kind="on",
        default_text="always on",
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
        parse=integer,
        metavar="N",
        at_least=1,
    )
    seed: int | None = flag(
        None,
        "--seed",
        MEMORY,
        "Seed of dummy weights and of requests that bring none.",
        parse=integer,
        metavar="N",
        at_least=0,
        at_most=2**63 - 1,
        default_text="drawn at start",
    )

    # --- parallelism -----------------------------------------------------------------------------------------------
    tensor_parallel_size: int = flag(
        1,
        "--tensor-parallel-size --tp",
        PARALLEL,
        "Ranks that share each layer. Only 1 in this version.",
        parse=integer,
        metavar="N",
        at_least=1,
    )
    data_parallel_size: int = flag(
        1,
        "--data-parallel-size",
        PARALLEL,
        "Replicas of the model. Only 1 in this version.",
        parse=integer,
        metavar="N",
        at_least=1,
    )
    expert_parallel_size: int = flag(
        1,
        "--expert-parallel-size --ep-size",
        PARALLEL,
        "Ranks that the experts are spread over. Only 1 in this version.",
        parse=integer,
        metavar="N",
        at_least=1,
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
        if self.enable_chunked_prefill and self.chunked_prefill_size == -1:
            raise ConfigError(
                "--enable-chunked-prefill contradicts --chunked-prefill-size -1, which turns chunking off; drop one"
            )
        # `--api-key "$KEY"` with an unset KEY would let `Authorization: Bearer` in.
        for spelled, values in (("--api-key", self.api_key), ("--served-model-name", self.served_model_name)):
            if not all(value.strip() for value in values):
                raise ConfigError(f"{spelled} holds an empty value; give one or leave the flag out")


FLAGS = tuple(sorted(declared_flags(EngineArgs), key=lambda item: GROUPS.index(item.flag.group)))
"""All flags, heading by heading, in order of declaration."""


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
    for item in FLAGS:
        if item.flag.kind == "values" and item.field_name in values:
            values[item.field_name] = tuple(values[item.field_name])
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
