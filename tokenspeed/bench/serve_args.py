"""The command line of `tokenspeed bench serve`: names and defaults follow the public contract.

A flag that would have no effect with the chosen dataset or target is refused, so that a result never claims a setting
that was not used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.bench.arguments import integer, number, parse_all
from tokenspeed.bench.http_client import Timeouts
from tokenspeed.bench.stats import GOODPUT_KEYS, METRICS
from tokenspeed.config.flags import check, declared_flags, flag
from tokenspeed.protocol.errors import ConfigError

PROG = "tokenspeed bench serve"
_ABOUT = "Sends a load to an OpenAI-compatible server and reports latencies and throughput; the last line is JSON."

DATA, TARGET, LOAD, REQUEST, PROFILE, OUTPUT = "Data", "Target", "Load", "Request", "Profile", "Output"
DATASETS = ("random", "sharegpt", "sharegpt-shaped", "multi-turn")
BACKENDS = ("openai", "openai-chat", "tokenspeed")
ENDPOINTS = {"openai": "/v1/completions", "tokenspeed": "/v1/completions", "openai-chat": "/v1/chat/completions"}

_NO_ACTIVITY = "servers' torch profilers record CPU and GPU"

ONLY_FOR = {
    "dataset_path": ("sharegpt",),
    "sharegpt_output_len": ("sharegpt", "sharegpt-shaped"),
    "skip_min_tokens_check": ("sharegpt",),
    "apply_chat_template": ("sharegpt",),
    "random_input_len": ("random",),
    "random_output_len": ("random",),
    "random_range_ratio": ("random",),
    "random_prefix_len": ("random",),
    "random_vocab_size": ("random", "sharegpt-shaped", "multi-turn"),
    "input_len": ("random",),
    "system_len": ("multi-turn",),
    "num_turns": ("multi-turn",),
    "turn_len": ("multi-turn",),
}
"""Field -> the datasets it means something for."""


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise ValueError("outside of 0 to 100")
    return values


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(METRICS):
        raise ValueError("unknown metric")
    return names


_json_object.__name__, _percentiles.__name__ = "JSON object", "list of percentiles (50,99)"
_metrics.__name__ = f"list of metrics ({','.join(METRICS)})"


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """See each flag's help. Made by `parse_serve`, which also checks what belongs together.

    Raises:
        ConfigError: on construction, for a value outside a flag's choices or limits.
    """

    dataset_name: str = flag("random", "--dataset-name", DATA, "What is sent. `sharegpt-shaped` and `multi-turn` are "
                             "synthetic.", choices=DATASETS, refused_choices={"mtbench": "it is not shipped"})
    dataset_path: str | None = flag(None, "--dataset-path", DATA, "ShareGPT JSON file.", metavar="FILE")
    num_prompts: int = flag(1000, "--num-prompts", DATA, "Requests; of multi-turn sessions, all turns together.",
                            parse=integer, metavar="N", at_least=1)
    input_len: int | None = flag(None, "--input-len", DATA, "Another name of --random-input-len.", parse=integer,
                                 metavar="TOKENS", at_least=1)
    output_len: int | None = flag(None, "--output-len", DATA, "Output tokens, whatever the dataset.", parse=integer,
                                  metavar="TOKENS", at_least=1)
    random_input_len: int = flag(1024, "--random-input-len", DATA, "Prompt tokens after the common prefix.",
                                 parse=integer, metavar="TOKENS", at_least=1)
    random_output_len: int = flag(128, "--random-output-len", DATA, "Output tokens.", parse=integer, metavar="TOKENS",
                                  at_least=1)
    random_range_ratio: float = flag(0.0, "--random-range-ratio", DATA, "Lengths are uniform in len * (1 - R) to "
                                     "len * (1 + R).", parse=number, metavar="R", at_least=0, at_most=0.999)
    random_prefix_len: int = flag(0, "--random-prefix-len", DATA, "Tokens at the start that all prompts share.",
                                  parse=integer, metavar="TOKENS", at_least=0)
    random_vocab_size: int = flag(32000, "--random-vocab-size", DATA, "Random token ids are below it.", parse=integer,
                                  metavar="N", at_least=2)
    sharegpt_output_len: int | None = flag(None, "--sharegpt-output-len", DATA, "Output tokens, instead of the "
                                           "answer's own.", parse=integer, metavar="TOKENS", at_least=1)
    system_len: int = flag(1024, "--system-len", DATA, "Tokens of the system prompt that all sessions share.",
                           parse=integer, metavar="TOKENS", at_least=0)
    num_turns: int = flag(5, "--num-turns", DATA, "Turns of a session.", parse=integer, metavar="N", at_least=1)
    turn_len: int = flag(64, "--turn-len", DATA, "New tokens a turn.", parse=integer, metavar="TOKENS", at_least=1)
    max_model_len: int | None = flag(None, "--max-model-len", DATA, "Prompt and output together; longer conversations "
                                     "are left out.", parse=integer, metavar="TOKENS", at_least=2)
    skip_min_tokens_check: bool = flag(False, "--skip-min-tokens-check", DATA, "Keep conversations of fewer than 4 "
                                       "tokens.", kind="on")

    backend: str = flag("openai", "--backend", TARGET, "API of the server. `tokenspeed` is the completions API with "
                        "`return_token_ids`, so that every token is seen.", choices=BACKENDS)
    base_url: str | None = flag(None, "--base-url", TARGET, "Address instead of host and port, without the endpoint.",
                                metavar="URL")
    host: str = flag("127.0.0.1", "--host", TARGET, "Host of the server.", metavar="HOST")
    port: int = flag(8000, "--port", TARGET, "Port of the server.", parse=integer, metavar="PORT", at_least=1,
                     at_most=65535)
    endpoint: str | None = flag(None, "--endpoint", TARGET, "Path of the API.", metavar="PATH",
                                default_text="/v1/completions, with --backend openai-chat /v1/chat/completions")
    header: tuple[str, ...] = flag((), "--header", TARGET, "More HTTP headers.", kind="values", metavar="NAME=VALUE")
    model: str | None = flag(None, "--model", TARGET, "Model to ask for.", metavar="MODEL",
                             default_text="the first that the server lists")
    served_model_name: str | None = flag(None, "--served-model-name", TARGET, "Name sent instead of --model.",
                                         metavar="NAME")
    tokenizer: str | None = flag(None, "--tokenizer", TARGET, "Tokenizer for datasets that need text: a folder, a "
                                 ".gguf file, a hub id or `default`.", metavar="MODEL", default_text="the model's")
    skip_tokenizer_init: bool = flag(False, "--skip-tokenizer-init", TARGET, "Load no tokenizer; datasets that need "
                                     "one are refused.", kind="on")
    insecure: bool = flag(False, "--insecure", TARGET, "Accept any TLS certificate.", kind="on")

    request_rate: float = flag(math.inf, "--request-rate", LOAD, "Sessions that begin a second; inf = all at once.",
                               parse=number, metavar="RPS", at_least=1e-6)
    burstiness: float = flag(1.0, "--burstiness", LOAD, "Shape of the gamma distribution of gaps; 1 is Poisson, less "
                             "is burstier.", parse=number, metavar="SHAPE", at_least=1e-3)
    max_concurrency: int | None = flag(None, "--max-concurrency", LOAD, "Requests in flight at most.", parse=integer,
                                       metavar="N", at_least=1, default_text="no limit")
    num_warmups: int = flag(0, "--num-warmups", LOAD, "Unmeasured requests first, with content of their own.",
                            parse=integer, metavar="N", at_least=0)
    ready_check_timeout_sec: float = flag(600.0, "--ready-check-timeout-sec", LOAD, "Seconds to wait for the server; "
                                          "0 does not wait.", parse=number, metavar="SECONDS", at_least=0)
    ramp_up_strategy: str | None = flag(None, "--ramp-up-strategy", LOAD, "How the rate rises, instead of "
                                        "--request-rate.", choices=("linear", "exponential"))
    ramp_up_start_rps: float | None = flag(None, "--ramp-up-start-rps", LOAD, "First rate.", parse=number,
                                           metavar="RPS", at_least=1e-6)
    ramp_up_end_rps: float | None = flag(None, "--ramp-up-end-rps", LOAD, "Last rate.", parse=number, metavar="RPS",
                                         at_least=1e-6)
    seed: int = flag(0, "--seed", LOAD, "Of content, lengths and arrivals.", parse=integer, metavar="N", at_least=0)

    ignore_eos: bool = flag(False, "--ignore-eos", REQUEST, "Generate the full output length; on unless "
                            "--disable-ignore-eos.", kind="on", default_text="on")
    disable_ignore_eos: bool = flag(False, "--disable-ignore-eos", REQUEST, "Let answers end early; the field is then "
                                    "not sent.", kind="on")
    apply_chat_template: bool = flag(False, "--apply-chat-template", REQUEST, "Put questions as the model's chat "
                                     "template does, for a completions API.", kind="on")
    logprobs: int | None = flag(None, "--logprobs", REQUEST, "Ask for logprobs with that many alternatives.",
                                parse=integer, metavar="N", at_least=0)
    extra_body: dict[str, Any] | None = flag(  # noqa: RUF009 (it is dataclasses.field() with our metadata)
        None, "--extra-body --extra-request-body", REQUEST, "JSON object laid over each body.", parse=_json_object,
        metavar="JSON")
    request_id_prefix: str = flag("bench-", "--request-id-prefix", REQUEST, "Requests are named by it and a number "
                                  "(header X-Request-Id).", metavar="TEXT")
    label: str | None = flag(None, "--label", REQUEST, "Name of the run in the results.", metavar="TEXT")

    profile: bool = flag(False, "--profile", PROFILE, "Have the server profile the measured load (/start_profile, "
                         "/stop_profile). The latencies are then those of a profiled server.", kind="on")
    profile_num_steps: int | None = flag(None, "--profile-num-steps", PROFILE, "Engine steps after which the profile "
                                         "ends.", parse=integer, metavar="N", at_least=1, at_most=1_000_000,
                                         default_text="the whole load")
    profile_activities: tuple[str, ...] = flag((), "--profile-activities", PROFILE, "What is recorded.", kind="values",
                                               choices=("CPU", "GPU"), default_text="what the server usually records",
                                               refused_choices=dict.fromkeys(
                                                   ("MEM", "CUDA_PROFILER", "VIZTRACER", "PROTON"), _NO_ACTIVITY))

    goodput: tuple[str, ...] = flag((), "--goodput", OUTPUT, "Limits in ms that a good request keeps: ttft, tpot, "
                                    "e2el.", kind="values", metavar="KEY:MS")
    percentile_metrics: tuple[str, ...] = flag(METRICS, "--percentile-metrics", OUTPUT, "Latencies that are shown.",
                                               parse=_metrics, metavar="KEY,KEY,...", default_text=",".join(METRICS))
    metric_percentiles: tuple[float, ...] = flag((99.0,), "--metric-percentiles", OUTPUT, "Percentiles of them.",
                                                 parse=_percentiles, metavar="P,P,...", default_text="99")
    save_result: bool = flag(False, "--save-result", OUTPUT, "Write the JSON to a file.", kind="on")
    append_result: bool = flag(False, "--append-result", OUTPUT, "Append it as a line instead.", kind="on")
    save_detailed: bool = flag(False, "--save-detailed", OUTPUT, "With each request's lengths, latencies, text and "
                               "error in the file.", kind="on")
    result_dir: str | None = flag(None, "--result-dir", OUTPUT, "Folder of the file.", metavar="FOLDER",
                                  default_text="the current one")
    output_file: str | None = flag(None, "--output-file --result-filename", OUTPUT, "Name of the file.",
                                   metavar="FILE", default_text="made of backend, rate, model and time")
    disable_tqdm: bool = flag(False, "--disable-tqdm", OUTPUT, "No progress bar.", kind="on")

    def __post_init__(self) -> None:
        for declared in declared_flags(ServeArgs):
            check(declared, getattr(self, declared.field_name))
    # fmt: on

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def url(self) -> str:
        """Server's address, without a path."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def headers(self) -> dict[str, str]:
        """Of every request: `--header`, and the bearer from OPENAI_API_KEY."""
        key = os.environ.get("OPENAI_API_KEY")
        given = {"Authorization": f"Bearer {key}"} if key else {}
        return given | dict(pair.split("=", 1) for pair in self.header)

    @property
    def goodput_ms(self) -> dict[str, float]:
        """Metric -> limit."""
        return {name: float(limit) for name, limit in (pair.split(":", 1) for pair in self.goodput)}


def parse_serve(argv: Sequence[str]) -> ServeArgs:
    """The command line after `bench serve`.

    Raises:
        ConfigError: a flag that is unknown, refused, wrong, or without effect beside the others.
    """
    flags = declared_flags(ServeArgs)
    values = parse_all(flags, argv, PROG, _ABOUT)
    for item in flags:
        if item.flag.kind == "values" and item.field_name in values:
            values[item.field_name] = tuple(values[item.field_name])
    names = {item.field_name: item.flag.names[0] for item in flags}
    args = ServeArgs(**values)
    for field_name, datasets in ONLY_FOR.items():
        if field_name in values and args.dataset_name not in datasets:
            raise ConfigError(
                f"{names[field_name]} has no effect on --dataset-name {args.dataset_name}; it is for "
                f"{' and '.join(datasets)}"
            )
    _check_pairs(args, values)
    _check_spelling(args)
    return args


def _check_pairs(args: ServeArgs, values: dict[str, Any]) -> None:
    """Flags that contradict or need each other."""
    contradictions = (
        ("input_len", "random_input_len"), ("output_len", "random_output_len"), ("output_len", "sharegpt_output_len"),
        ("base_url", "host"), ("base_url", "port"), ("ignore_eos", "disable_ignore_eos"),
        ("skip_tokenizer_init", "tokenizer"), ("ramp_up_strategy", "request_rate"), ("save_result", "append_result"),
    )  # fmt: skip
    for one, other in contradictions:
        if one in values and other in values:
            raise ConfigError(f"{_spelled(one)} and {_spelled(other)} exclude each other; give one of them")
    for needed, asking in (("ramp_up_start_rps", "ramp_up_strategy"), ("ramp_up_end_rps", "ramp_up_strategy")):
        if (needed in values) != (asking in values):
            raise ConfigError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together; give all")
    if args.apply_chat_template and args.is_chat:
        raise ConfigError("--apply-chat-template has no effect with --backend openai-chat: the server applies it there")
    for name in ("profile_num_steps", "profile_activities"):
        if name in values and not args.profile:
            raise ConfigError(f"{_spelled(name)} has no effect without --profile")
    if args.dataset_name == "sharegpt" and args.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path with its JSON file (or use sharegpt-shaped)")
    if not (args.save_result or args.append_result):
        for name in ("result_dir", "output_file", "save_detailed"):
            if name in values:
                raise ConfigError(f"{_spelled(name)} has no effect without --save-result or --append-result")
    if math.isinf(args.request_rate) and args.ramp_up_strategy is None and "burstiness" in values:
        raise ConfigError("--burstiness has no effect when all requests are sent at once; give a --request-rate")
    if args.endpoint is not None and args.endpoint.endswith("/chat/completions") != args.is_chat:
        raise ConfigError(f"--endpoint is {args.endpoint}, which is not the API of --backend {args.backend}")


def _check_spelling(args: ServeArgs) -> None:
    """Values that have a grammar of their own."""
    for pair in args.header:
        if "=" not in pair:
            raise ConfigError(f"--header is {pair!r}, it must be NAME=VALUE")
    for pair in args.goodput:
        name, _, limit = pair.partition(":")
        try:
            is_right = name in GOODPUT_KEYS and float(limit) > 0
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigError(f"--goodput is {pair!r}, it must be KEY:MS with a KEY of {', '.join(GOODPUT_KEYS)}")
    if args.base_url is not None and not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {args.base_url!r}, it must begin with http:// or https://")


def _spelled(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def read_timeouts() -> tuple[Timeouts, float]:
    """Limits of one request, and of the whole run in seconds, from TOKENSPEED_BENCH_*_TIMEOUT_SEC.

    Raises:
        ConfigError: a value that is no number above 0.
    """

    def seconds(name: str, default: float) -> float:
        variable = f"TOKENSPEED_BENCH_{name}_TIMEOUT_SEC"
        text = os.environ.get(variable)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ConfigError(f"{variable} is {text!r}, it must be a number of seconds above 0")
        return value

    one = Timeouts(seconds("SOCK_CONNECT", 30.0), seconds("SOCK_READ", 1800.0), seconds("PER_REQUEST", 3600.0))
    return one, seconds("TOTAL", 21600.0)
