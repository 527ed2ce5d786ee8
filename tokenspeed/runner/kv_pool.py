"""The KV pool: one allocation a layer, and how many pages memory allows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenspeed.cache.spec import GroupSpec, LayerCacheSpec, group_layers
from tokenspeed.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages: keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim].

    The last page is scratch: whatever is written there is never read by a request. An 8-bit pool holds key / k_scale
    and value / v_scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def size_groups(
    layers: list[LayerCacheSpec], page_size: int, num_pages: int | None, kv_memory_bytes: int, max_useful_tokens: int
) -> list[GroupSpec]:
    """Cache groups with their number of pages.

    Args:
        num_pages: an explicit size, or None to take what `kv_memory_bytes` holds, at most `max_useful_tokens`.
    """
    groups = group_layers(layers, page_size)
    if num_pages is None:
        bytes_per_page = sum(group.page_bytes for group in groups)
        useful = -(-max_useful_tokens // page_size)
        num_pages = max(1, min(kv_memory_bytes // bytes_per_page, useful))
    return [replace(group, num_pages=num_pages) for group in groups]


def check_capacity(groups: list[GroupSpec], max_model_len: int) -> None:
    """One sequence of full length must fit, or a lone request could never finish.

    Raises:
        ConfigError: it does not. Names the bytes needed, the bytes there and the flags that make it fit.
    """
    for group in groups:
        tokens = group.num_pages * group.page_size
        if tokens >= max_model_len:
            continue
        needed = -(-max_model_len // group.page_size) * group.page_bytes
        raise ConfigError(
            f"the KV pool holds {tokens} tokens ({group.num_pages * group.page_bytes} bytes), but one sequence of "
            f"--max-model-len {max_model_len} needs {needed} bytes; give the pool more memory or set --max-model-len "
            f"to {tokens} or less"
        )


def allocate(
    groups: list[GroupSpec],
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: list[tuple[float, float]] | None = None,
) -> list[LayerPages]:
    """Pages of every layer, not initialised: a page is always written before it is read.

    Args:
        scales: (k_scale, v_scale) of each layer; None = 1.
    """
    (group,) = groups  # one full-attention group so far; more groups bring a layer-to-group map
    shape = (group.num_pages + 1, group.page_size, num_kv_heads, head_dim)
    return [
        LayerPages(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
            k_scale,
            v_scale,
        )
        for k_scale, v_scale in scales or [(1.0, 1.0)] * num_layers
    ]
