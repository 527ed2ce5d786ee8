"""What `--quantization` and `--kv-cache-dtype` come to for a checkpoint."""

from __future__ import annotations

from typing import Literal

from tokenspeed.config.args import EngineArgs
from tokenspeed.config.engine import Choice
from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3"]

_CHANNEL_SCHEMES = ("w8a8_fp8", "compressed-tensors")
"""Two names of one thing, which may stand for each other."""


def quantize_on_load(args: EngineArgs, model: ModelConfig) -> Literal["fp8"] | None:
    """What a dense checkpoint is quantized to while it loads; None = weights stay as they are stored.

    Raises:
        ConfigError: `--quantization` contradicts the checkpoint.
    """
    asked = args.quantization
    if asked is None:
        return None
    stored = model.quantization
    if stored is not None:
        names = {stored.method, "fp8"} if stored.method == "modelopt" else {stored.method}
        if stored.method == "compressed-tensors":
            names |= set(_CHANNEL_SCHEMES)
        if asked not in names:
            raise ConfigError(
                f"--quantization is {asked}, but the checkpoint is quantized by {stored.method}; leave the flag out, "
                f"or use one of: {', '.join(sorted(names & {'fp8', 'mxfp4', *_CHANNEL_SCHEMES}))}"
            )
        return None
    if model.qtype is not None:
        raise ConfigError(
            f"--quantization is {asked}, but the checkpoint holds {model.qtype} blocks, which stay as they are; leave "
            "the flag out, or use a checkpoint that is not quantized"
        )
    if asked != "fp8":
        raise ConfigError(
            f"--quantization is {asked}, but the checkpoint is not quantized; --quantization fp8 quantizes it while "
            "it loads"
        )
    return "fp8"


def check_quantizing(quantizes: Literal["fp8"] | None, dtype: Dtype, has_experts: bool, obstacle: str | None) -> None:
    """On a GPU: what is quantized must be kept so, or its accuracy is lost for nothing.

    Args:
        obstacle: why the GPU has no 8-bit floats, if so.
    Raises:
        ConfigError: the weights would be widened again as soon as they are quantized. Names the remedy.
    """
    if quantizes is None:
        return
    if obstacle is not None:
        raise ConfigError(
            f"--quantization is {quantizes}, but {obstacle}; leave the flag out, which keeps the weights as they are "
            "stored, or take a smaller model if they do not fit"
        )
    if dtype != "bfloat16" and not has_experts:
        raise ConfigError(
            f"--quantization is {quantizes}, but with --dtype {dtype} no kernel keeps weights in 8 bits; use --dtype "
            "bfloat16, or leave the flag out"
        )


def kv_dtype(
    args: EngineArgs, model: ModelConfig, dtype: Dtype, choices: list[Choice], obstacle: str | None = None
) -> KVDtype:
    """Precision of the KV cache.

    Args:
        obstacle: why the GPU has no 8-bit floats, if so.
    Raises:
        ConfigError: they were asked for. Names the remedy.
    """
    if args.kv_cache_dtype != "auto":
        if obstacle is not None:
            raise ConfigError(f"--kv-cache-dtype is {args.kv_cache_dtype}, but {obstacle}; use --kv-cache-dtype auto")
        return "fp8_e4m3"
    if model.kv_cache_is_fp8 and obstacle is not None:
        choices.append(Choice("--kv-cache-dtype", dtype, f"the checkpoint was made for fp8_e4m3, but {obstacle}"))
        return dtype
    if model.kv_cache_is_fp8:
        choices.append(Choice("--kv-cache-dtype", "fp8_e4m3", "the checkpoint was made for it"))
        return "fp8_e4m3"
    choices.append(Choice("--kv-cache-dtype", dtype, "that of the activations"))
    return dtype
