"""The KV pool: keys and values of each storage of a page, and how many pages memory allows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenspeed.cache.capacity import sequence_capacity, sequence_pages
from tokenspeed.cache.spec import GroupSpec, LayerCacheSpec, group_layers, layer_places, num_storages
from tokenspeed.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages: keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim]. Layers of different
    cache groups may share these tensors; a page belongs to one group at a time.

    The last page is scratch: whatever is written there is never read by a request. An 8-bit pool holds key / k_scale
    and value / v_scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def size_groups(
    layers: list[LayerCacheSpec],
    page_size: int,
    num_pages: int | None,
    kv_memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    step_tokens: int,
) -> list[GroupSpec]:
    """Cache groups with the number of pages of their pool.

    Args:
        num_pages: an explicit size in pages of each group, or None to take what `kv_memory_bytes` holds, at most what
            `max_num_seqs` sequences of `max_model_len` tokens can use.
        step_tokens: tokens of one sequence in a step, at most.
    """
    groups = group_layers(layers, page_size)
    if num_pages is not None:
        return with_pages(groups, num_pages * len(groups))
    useful = max_num_seqs * sequence_pages(groups, max_model_len, step_tokens)
    return with_pages(groups, max(1, min(kv_memory_bytes // groups[0].page_bytes, useful)))


def with_pages(groups: list[GroupSpec], num_pages: int) -> list[GroupSpec]:
    """The groups over a pool of so many pages."""
    return [replace(group, num_pages=num_pages) for group in groups]


def check_capacity(groups: list[GroupSpec], max_model_len: int, step_tokens: int) -> None:
    """One sequence of full length must fit, or a lone request could never finish.

    Raises:
        ConfigError: it does not. Names the bytes needed, the bytes there and the flags that make it fit.
    """
    there, page_bytes = groups[0].num_pages, groups[0].page_bytes
    needed = sequence_pages(groups, max_model_len, step_tokens)
    if needed <= there:
        return
    fits = sequence_capacity(groups, step_tokens)
    raise ConfigError(
        f"the KV pool holds {fits} tokens of one sequence ({there * page_bytes} bytes), but one of --max-model-len "
        f"{max_model_len} needs {needed * page_bytes} bytes; raise --kv-cache-memory-gb (or --max-total-tokens), or "
        f"{shorter(fits)}"
    )


def shorter(fits: int) -> str:
    """The remedy where one sequence of at most `fits` tokens has room."""
    if fits:
        return f"set --max-model-len to {fits} or less"
    return "lower --chunked-prefill-size (the pool holds no sequence in steps of so many tokens)"


def allocate(
    layers: list[LayerCacheSpec],
    groups: list[GroupSpec],
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
    shape = (groups[0].num_pages + 1, groups[0].page_size, num_kv_heads, head_dim)
    storages = [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(num_storages(layers))
    ]
    return [
        LayerPages(*storages[place.storage], k_scale, v_scale)
        for place, (k_scale, v_scale) in zip(layer_places(layers), scales or [(1.0, 1.0)] * len(layers), strict=True)
    ]
