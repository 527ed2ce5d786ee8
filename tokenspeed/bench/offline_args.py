"""The command line of `tokenspeed bench offline`: its own flags, then any engine flag of `tokenspeed serve`.

Owns how the engine is set up where the user left a flag open, so that nothing but the step is measured: no prefix
cache, no tokenizer, whole prompts in one forward, room for the largest shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed.bench.arguments import counts, integer, number, parse_known, shapes
from tokenspeed.config.args import FLAGS, EngineArgs, parse_args
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.flags import check, declared_flags, flag, parse_flags
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.server_args import API, LOGS
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.protocol.sampling import SamplingParams

PROG = "tokenspeed bench offline"
SHORT_LEN, LONG_LEN = 24, 152
"""Output tokens of the two runs whose difference is the time of 128 decode steps."""

DEFAULT_PREFILL = ((1, 1024), (1, 8000), (16, 1024))
_ABOUT = (
    "Times decode steps and whole-prompt forwards of an engine in this process, beside the memory and compute bound. "
    "Engine flags of `tokenspeed serve` may follow."
)
_SHAPES = "Shapes"
_SAMPLING = "Sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineArgs:
    """What to measure. See each flag's help.

    Raises:
        ConfigError: on construction, for a value outside a flag's limits.
    """

    model_config: str | None = flag(
        None,
        "--model-config",
        _SHAPES,
        "A bare config.json instead of a model; its weights are random (--load-format dummy).",
        metavar="FILE",
        default_text="the engine's --model",
    )
    prompt_len: int = flag(
        512,
        "--prompt-len",
        _SHAPES,
        "Prompt tokens of each decoding request.",
        parse=integer,
        metavar="TOKENS",
        at_least=1,
    )
    batch: tuple[int, ...] = flag(
        (1, 4, 16), "--batch", _SHAPES, "Requests that decode together; `none` for no decoding.", parse=counts,
        metavar="N,N,...", default_text="1,4,16",
    )  # fmt: skip
    prefill: tuple[tuple[int, int], ...] | None = flag(
        None,
        "--prefill",
        _SHAPES,
        "Prompts x tokens to forward whole, with one output token; `none` for none.",
        parse=shapes,
        metavar="NxTOKENS,...",
        default_text="1x1024,1x8000,16x1024, as far as the model's context allows",
    )
    repeats: int = flag(
        3, "--repeats", _SHAPES, "Measured runs of each shape; medians are shown.", parse=integer, metavar="N",
        at_least=1, at_most=1000,
    )  # fmt: skip
    temperature: float = flag(
        0.0, "--temperature", _SAMPLING, "Of every request; 0 is greedy.", parse=number, metavar="T", at_least=0,
        at_most=2,
    )  # fmt: skip
    top_k: int = flag(
        0, "--top-k", _SAMPLING, "Sample among so many tokens; 0 among all.", parse=integer, metavar="K", at_least=0
    )  # fmt: skip
    top_p: float = flag(
        1.0, "--top-p", _SAMPLING, "Sample among the tokens that hold this share.", parse=number, metavar="P",
        at_least=1e-6, at_most=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for declared in declared_flags(OfflineArgs):
            check(declared, getattr(self, declared.field_name))
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ConfigError("--top-k and --top-p have no effect on greedy decoding; give a --temperature above 0")

    @property
    def sampling(self) -> SamplingParams:
        """Of every request; lengths are still to be set."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, ignore_eos=True)

    def prefill_shapes(self, max_position: int) -> tuple[tuple[int, int], ...]:
        """The asked shapes, or of the default ones those that the model's context holds."""
        if self.prefill is not None:
            return self.prefill
        return tuple(shape for shape in DEFAULT_PREFILL if shape[1] < max_position)


def parse_offline(argv: Sequence[str]) -> tuple[OfflineArgs, EngineArgs, frozenset[str]]:
    """The command line after `bench offline`.

    Returns:
        what to measure, the engine's wishes, and which of its fields were given.

    Raises:
        ConfigError: a flag that is unknown, wrong, or without effect here.
    """
    values, words = parse_known(declared_flags(OfflineArgs), argv, PROG, _ABOUT)
    own = OfflineArgs(**values)
    given, positionals = parse_flags(FLAGS, words, PROG)
    _refuse(given)
    engine = parse_args(words, PROG)
    if own.model_config is not None:
        if positionals or "model" in given:
            raise ConfigError(f"the model was given twice, as --model-config {own.model_config} and as {engine.model}")
        if engine.load_format not in ("auto", "dummy"):
            raise ConfigError(
                f"--model-config has no weights, but --load-format is {engine.load_format}; use --load-format dummy"
            )
        engine = replace(engine, model=own.model_config, load_format="dummy")
    return own, replace(engine, enable_prefix_caching=False, skip_tokenizer_init=True), frozenset(given)


def fit(
    own: OfflineArgs, wishes: EngineArgs, given: frozenset[str], model: ModelConfig, first: EngineConfig
) -> EngineArgs:
    """The wishes with room for every shape, where the user left the size open.

    Args:
        given: fields that the user set; they stay.
        first: what the wishes alone resolve to, for the sizes that the engine would choose itself.

    Raises:
        ConfigError: a shape that the model's context, or a size given by the user, does not hold.
    """
    prefill = own.prefill_shapes(model.max_position)
    if not own.batch and not prefill:
        raise ConfigError("--batch and --prefill leave nothing to measure; give at least one shape")
    longest = max([own.prompt_len + LONG_LEN] * bool(own.batch) + [length + 1 for _, length in prefill])
    limit = wishes.max_model_len if wishes.max_model_len is not None else model.max_position
    if longest > limit:
        raise ConfigError(
            f"the longest request has {longest} tokens (decoding takes {LONG_LEN} after the prompt), the context is "
            f"{limit}; lower --prompt-len or --prefill"
        )
    widest = max([*own.batch, *(number for number, _ in prefill)])
    changes: dict[str, Any] = {}
    if "max_model_len" not in given:
        changes["max_model_len"] = longest
    if "max_num_seqs" not in given:
        changes["max_num_seqs"] = max(widest, wishes.max_num_seqs)
    elif widest > wishes.max_num_seqs:
        raise ConfigError(f"--max-num-seqs is {wishes.max_num_seqs}, but {widest} requests are to run together")
    prompt = max((length for _, length in prefill), default=0)
    if "chunked_prefill_size" not in given:
        changes["chunked_prefill_size"] = max(prompt, first.max_num_batched_tokens)
    sizes_pool = {"max_total_tokens", "kv_cache_memory_gb", "gpu_memory_utilization"}
    if first.device == "cpu" and not sizes_pool & given:
        changes["max_total_tokens"] = needed_tokens(own, prefill, first.page_size)
    return replace(wishes, **changes)


def needed_tokens(own: OfflineArgs, prefill: tuple[tuple[int, int], ...], page_size: int) -> int:
    """Tokens of KV cache that the largest shape takes, in whole pages and with one page to spare a request."""

    def paged(number: int, length: int) -> int:
        return number * (-(-length // page_size) + 1) * page_size

    decoding = [paged(number, own.prompt_len + LONG_LEN) for number in own.batch]
    return max(decoding + [paged(number, length + 1) for number, length in prefill])


def _refuse(given: dict[str, Any]) -> None:
    """Flags that would have no effect, or the wrong one."""
    spelled = {item.field_name: item.flag for item in FLAGS}
    for name in given:
        if (spelled[name].group in (API, LOGS) and name != "log_level") or name == "max_queue_len":
            raise ConfigError(f"{spelled[name].names[0]} concerns only the server; leave it out of `{PROG}`")
    if given.get("enable_prefix_caching"):
        raise ConfigError("--enable-prefix-caching would hide work; the benchmark runs without the prefix cache")
    for name in ("tokenizer", "trust_remote_code"):
        if name in given:
            raise ConfigError(f"{spelled[name].names[0]} has no effect: the benchmark works in token ids")
