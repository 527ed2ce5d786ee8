"""How large the KV cache is, and how long a sequence it holds, as far as that is known before the start."""

from __future__ import annotations

from typing import Literal

from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import DeviceInfo
from tokenspeed.config.engine import Choice
from tokenspeed.config.model import ModelConfig
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30
KV_MEMORY_SHARE = 0.25
KV_MEMORY_LIMIT_BYTES = 4 * GIB

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Bytes of keys and values of one token in a page: in all layers; where some have a sliding window, and so pages of
    their own, in the larger of both groups, which is the size of every page."""
    sliding = sum(window is not None for window in model.layer_windows)
    layers = max(sliding, model.num_layers - sliding)
    return 2 * layers * model.num_kv_heads * model.head_dim * _DTYPE_BYTES[dtype]


def kv_size(
    args: EngineArgs,
    device: DeviceInfo,
    kind: Literal["cpu", "cuda"],
    page_size: int,
    token_bytes: int,
    choices: list[Choice],
) -> tuple[int | None, int | None]:
    """(pages, None) when given in tokens, (None, bytes), or (None, None) for what a GPU has left after a warm-up.

    Args:
        token_bytes: see `kv_bytes_per_token`.
    Raises:
        ConfigError: a size that is none, or more than the machine's memory.
    """
    there = device.memory_available_bytes if kind == "cpu" else device.gpus[0].memory_total_bytes
    where = f"only {there / GIB:.1f} GiB {'are available' if kind == 'cpu' else 'are in the GPU'}"
    if args.max_total_tokens is not None:
        if args.kv_cache_memory_gb is not None:
            raise ConfigError(
                f"--max-total-tokens {args.max_total_tokens} and --kv-cache-memory-gb {args.kv_cache_memory_gb:g} both "
                "size the KV cache; give one of them"
            )
        num_pages = args.max_total_tokens // page_size
        if num_pages == 0:
            raise ConfigError(
                f"--max-total-tokens is {args.max_total_tokens}, less than one page of {page_size} tokens; raise it to "
                f"at least {page_size} or lower --prefix-granularity"
            )
        if num_pages * page_size * token_bytes > there:
            needed = args.max_total_tokens * token_bytes / GIB
            raise ConfigError(
                f"--max-total-tokens is {args.max_total_tokens}, which takes {needed:.1f} GiB ({token_bytes} bytes a "
                f"token), but {where}; lower it to at most {there // token_bytes} or free memory"
            )
        return num_pages, None
    if args.kv_cache_memory_gb is not None:
        wanted = int(args.kv_cache_memory_gb * GIB)
        if wanted > there:
            raise ConfigError(
                f"--kv-cache-memory-gb is {args.kv_cache_memory_gb:g}, but {where}; lower it or free memory"
            )
        return None, wanted
    if kind == "cuda":
        reason = "the share of --gpu-memory-utilization less weights, activations and graphs, as measured at start"
        choices.append(Choice("--kv-cache-memory-gb", "what is left", reason))
        return None, None
    share = int(device.memory_available_bytes * KV_MEMORY_SHARE)
    size = min(share, KV_MEMORY_LIMIT_BYTES)
    available = f"{device.memory_available_bytes / GIB:.1f} GiB available"
    reason = f"25 % of {available}" if size == share else f"4 GiB at most without being asked for more ({available})"
    choices.append(Choice("--kv-cache-memory-gb", f"{size / GIB:.2f}", reason))
    return None, size


def kv_capacity(
    model: ModelConfig,
    num_pages: int | None,
    kv_memory_bytes: int | None,
    page_size: int,
    token_bytes: int,
    step_tokens: int,
) -> int | None:
    """Tokens of the longest sequence that the pool holds; None where only the start will tell.

    Layers with a sliding window keep what the window and one step reach, in pages of their own.

    Args:
        step_tokens: tokens of a sequence in one step, at most; -1 = all of them.
    """
    if num_pages is not None:
        return num_pages * page_size
    if kv_memory_bytes is None:
        return None
    there = kv_memory_bytes // (page_size * token_bytes)
    windows = {window for window in model.layer_windows if window is not None}
    if not windows:
        return there * page_size
    if step_tokens == -1:
        return there // 2 * page_size
    touched = max(windows) - 1 + step_tokens
    in_windows = 1 + -(-(touched - 1) // page_size)
    if None not in model.layer_windows:
        return there * page_size if there < in_windows else model.max_position
    return max(there // 2, there - in_windows) * page_size
