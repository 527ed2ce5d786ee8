"""How many pages memory allows, and what is said when they are too few."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenspeed.cache.spec import GroupSpec, LayerCacheSpec
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.kv_pool import allocate, check_capacity, size_groups

LAYERS = [LayerCacheSpec(layer, "full", "full", bytes_per_token=100) for layer in range(3)]
PAGE_BYTES = 3 * 100 * 16


def num_pages(explicit: int | None, memory: int, useful: int) -> int:
    (group,) = size_groups(LAYERS, 16, explicit, memory, useful)
    assert (group.page_size, group.page_bytes) == (16, PAGE_BYTES)
    return group.num_pages


def test_memory_counts_whole_pages() -> None:
    assert num_pages(None, 10 * PAGE_BYTES, 10**6) == 10
    assert num_pages(None, 10 * PAGE_BYTES - 1, 10**6) == 9


def test_no_more_than_all_sequences_can_use() -> None:
    assert num_pages(None, 10**9, 33) == 3
    assert num_pages(None, 10**9, 32) == 2


def test_an_explicit_number_is_taken_as_it_is() -> None:
    assert num_pages(7, 10**9, 1) == 7


def test_too_small_a_pool_names_bytes_and_remedy() -> None:
    groups = size_groups(LAYERS, 16, 4, 0, 1)
    check_capacity(groups, 64)
    with pytest.raises(ConfigError) as error:
        check_capacity(groups, 65)
    for part in ("64 tokens", f"{4 * PAGE_BYTES} bytes", "65", f"{5 * PAGE_BYTES} bytes", "to 64 or less"):
        assert part in str(error.value)


def test_every_group_must_hold_a_sequence() -> None:
    (large,) = size_groups(LAYERS, 16, 10, 0, 1)
    small: GroupSpec = replace(large, name="other", num_pages=1)
    with pytest.raises(ConfigError, match="holds 16 tokens"):
        check_capacity([large, small], 40)


def test_a_layer_has_all_pages_and_one_for_scratch() -> None:
    groups = size_groups(LAYERS, 16, 4, 0, 1)
    pages = allocate(groups, 3, 2, 8, torch.bfloat16, torch.device("cpu"))
    assert len(pages) == 3
    places = {tensor.data_ptr() for layer in pages for tensor in (layer.keys, layer.values)}
    assert len(places) == 6
    for layer in pages:
        assert layer.keys.shape == layer.values.shape == (5, 16, 2, 8)
        assert layer.keys.dtype == torch.bfloat16 and layer.keys.is_contiguous()
