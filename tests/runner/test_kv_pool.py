"""How many pages memory allows, and what is said when they are too few."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.cache.spec import LayerCacheSpec
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.kv_pool import allocate, check_capacity, size_groups, with_pages

LAYERS = [LayerCacheSpec(layer, "full", "full", bytes_per_token=100) for layer in range(3)]
MIXED = [
    *(LayerCacheSpec(layer, "window", "sliding_window", 100, window=20) for layer in range(2)),
    *(LayerCacheSpec(layer, "full", "full", 100) for layer in range(2, 5)),
]
PAGE_BYTES = 3 * 100 * 16
STEP = 64


def num_pages(explicit: int | None, memory: int, seqs: int, length: int, layers: list[LayerCacheSpec] = LAYERS) -> int:
    groups = size_groups(layers, 16, explicit, memory, seqs, length, STEP)
    assert {(group.page_size, group.page_bytes, group.num_pages) for group in groups} == {
        (16, PAGE_BYTES, groups[0].num_pages)
    }
    return groups[0].num_pages


def test_memory_counts_whole_pages() -> None:
    for layers in (LAYERS, MIXED):
        assert num_pages(None, 10 * PAGE_BYTES, 100, 10**4, layers) == 10
        assert num_pages(None, 10 * PAGE_BYTES - 1, 100, 10**4, layers) == 9


def test_no_more_than_all_sequences_can_use() -> None:
    assert num_pages(None, 10**9, 1, 33) == 3
    assert num_pages(None, 10**9, 2, 32) == 4
    assert num_pages(None, 10**9, 2, 32, MIXED) == 2 * (2 + 2)
    # A window of 20 and a step of 64 touch 83 tokens, on 7 pages at most.
    assert num_pages(None, 10**9, 2, 1600, MIXED) == 2 * (100 + 7)


def test_an_explicit_number_is_one_of_each_group() -> None:
    assert num_pages(7, 10**9, 1, 1) == 7
    assert num_pages(7, 10**9, 1, 1, MIXED) == 14


def refused(layers: list[LayerCacheSpec], pages: int, length: int, step: int = STEP) -> str:
    groups = with_pages(size_groups(layers, 16, 1, 0, 1, 1, STEP), pages)
    with pytest.raises(ConfigError) as error:
        check_capacity(groups, length, step)
    return str(error.value)


def test_too_small_a_pool_names_bytes_and_remedy() -> None:
    check_capacity(size_groups(LAYERS, 16, 4, 0, 1, 1, STEP), 64, STEP)
    message = refused(LAYERS, 4, 65)
    for part in ("64 tokens", f"{4 * PAGE_BYTES} bytes", "65", f"{5 * PAGE_BYTES} bytes", "to 64 or less"):
        assert part in message, message


def test_every_group_must_hold_its_part_of_a_sequence() -> None:
    groups = with_pages(size_groups(MIXED, 16, 1, 0, 1, 1, STEP), 107)
    check_capacity(groups, 1600, STEP)
    message = refused(MIXED, 106, 1600)
    for part in ("1584 tokens", f"{106 * PAGE_BYTES} bytes", f"{107 * PAGE_BYTES} bytes", "to 1584 or less"):
        assert part in message, message
    assert "lower --chunked-prefill-size" in refused(MIXED, 1, 1600)


def test_a_layer_has_all_pages_and_one_for_scratch() -> None:
    groups = size_groups(LAYERS, 16, 4, 0, 1, 1, STEP)
    pages = allocate(LAYERS, groups, 2, 8, torch.bfloat16, torch.device("cpu"))
    assert len(pages) == 3
    places = {tensor.data_ptr() for layer in pages for tensor in (layer.keys, layer.values)}
    assert len(places) == 6
    for layer in pages:
        assert layer.keys.shape == layer.values.shape == (5, 16, 2, 8)
        assert layer.keys.dtype == torch.bfloat16 and layer.keys.is_contiguous()


def test_layers_of_different_groups_share_memory_and_keep_their_scales() -> None:
    groups = size_groups(MIXED, 16, 2, 0, 1, 1, STEP)
    scales = [(1.0 + layer, 2.0 + layer) for layer in range(5)]
    pages = allocate(MIXED, groups, 2, 8, torch.float32, torch.device("cpu"), scales)
    keys = [layer.keys.data_ptr() for layer in pages]
    values = [layer.values.data_ptr() for layer in pages]
    assert (keys[0], keys[1]) == (keys[2], keys[3]) and (values[0], values[1]) == (values[2], values[3])
    assert len({*keys, *values}) == 2 * 3
    assert [(layer.k_scale, layer.v_scale) for layer in pages] == scales
    total = sum(tensor.nbytes for layer in pages[2:] for tensor in (layer.keys, layer.values))
    assert total == 5 * groups[0].page_bytes * 2 * 2 * 8 * 4 // 100  # bytes_per_token is made up, heads and dims not
