"""What layers declare, where they lie in the pool, and what a pool holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenspeed.cache.capacity import cache_profile, gone_pages, group_pages, sequence_capacity, sequence_pages
from tokenspeed.cache.spec import GroupSpec, LayerCacheSpec, LayerPlace, group_layers, layer_places, num_storages

FULL = GroupSpec("full", "full", 64, 1, 0)
SLIDING = GroupSpec("sliding", "sliding_window", 64, 1, 0, 128)


def alternating(num_layers: int, bytes_per_token: int = 2048, window: int = 128) -> list[LayerCacheSpec]:
    """Layers of GPT-OSS: sliding, full, sliding, full."""
    sliding = LayerCacheSpec(0, "sliding", "sliding_window", bytes_per_token, window)
    full = LayerCacheSpec(0, "full", "full", bytes_per_token)
    return [replace(full if layer % 2 else sliding, layer=layer) for layer in range(num_layers)]


def pool(num_pages: int, *groups: GroupSpec) -> list[GroupSpec]:
    return [replace(group, num_pages=num_pages) for group in groups]


def test_groups_share_storages() -> None:
    layers = alternating(24)
    sliding, full = group_layers(layers, 64)
    assert (sliding.name, sliding.kind, sliding.window) == ("sliding", "sliding_window", 128)
    assert (full.name, full.kind, full.window) == ("full", "full", None)
    assert sliding.page_bytes == full.page_bytes == 12 * 2048 * 64
    assert num_storages(layers) == 12
    assert layer_places(layers) == [LayerPlace(layer % 2, layer // 2) for layer in range(24)]


def test_a_page_has_the_storages_of_the_largest_group() -> None:
    layers = alternating(5)
    assert num_storages(layers) == 3
    assert [group.page_bytes for group in group_layers(layers, 16)] == [3 * 2048 * 16] * 2
    one_group = [LayerCacheSpec(layer, "full", "full", 10) for layer in range(4)]
    assert [group.page_bytes for group in group_layers(one_group, 16)] == [4 * 10 * 16]
    assert layer_places(one_group) == [LayerPlace(0, layer) for layer in range(4)]
    assert (num_storages([]), group_layers([], 16)) == (0, [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 64}, "layer 2 disagrees with its cache group 'sliding'"),
        ({"kind": "full", "window": None}, "layer 2 disagrees with its cache group 'sliding'"),
        ({"bytes_per_token": 1024}, "layer 2 has 1024 bytes per token, layer 0 has 2048"),
        ({"group": "other", "window": None}, "layer 2 is of kind 'sliding_window' and has a window of None"),
        ({"group": "other", "window": 0}, "layer 2 is of kind 'sliding_window' and has a window of 0"),
        ({"group": "other", "kind": "full"}, "layer 2 is of kind 'full' and has a window of 128"),
    ],
)
def test_layers_that_cannot_share_are_refused(changed: dict[str, object], message: str) -> None:
    layers = alternating(4)
    layers[2] = replace(layers[2], **changed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        group_layers(layers, 16)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("page_size", [1, 4, 6])
def test_exactly_the_pages_that_no_later_query_sees_are_gone(window: int, page_size: int) -> None:
    for num_tokens in range(40):
        gone = gone_pages(window, num_tokens, page_size)
        first_seen = max(0, num_tokens - window + 1)
        assert gone * page_size <= first_seen < (gone + 1) * page_size


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("step_tokens", [1, 2, 7, 50])
def test_pages_of_a_sequence_are_the_most_that_any_step_needs(window: int, step_tokens: int) -> None:
    group = GroupSpec("g", "sliding_window", 4, 1, 0, window)
    for num_tokens in range(1, 60):
        most = 0
        for start in range(num_tokens):
            end = min(start + step_tokens, num_tokens)
            most = max(most, -(-end // 4) - gone_pages(window, start, 4))
        promised = group_pages(group, num_tokens, step_tokens)
        assert most <= promised <= -(-num_tokens // 4)
        assert num_tokens < 4 * (window + step_tokens) or promised == most, "more than any beginning needs"


def test_capacity_is_the_last_length_that_fits() -> None:
    assert sequence_capacity(pool(10, FULL), 8192) == 640
    for num_pages, step_tokens in ((10, 64), (100, 512), (3, 64), (1, 64), (200, 8192)):
        groups = pool(num_pages, FULL, SLIDING)
        capacity = sequence_capacity(groups, step_tokens)
        assert sequence_pages(groups, capacity, step_tokens) <= num_pages
        assert sequence_pages(groups, capacity + 1, step_tokens) > num_pages
    assert sequence_capacity(pool(200, FULL, SLIDING), 64) == (200 - 4) * 64
    assert sequence_capacity(pool(4, SLIDING), 64) > 2**30, "windows alone never fill up"
    assert sequence_capacity(pool(3, SLIDING), 64) == 3 * 64, "but a short pool holds the tokens it has"


def test_gpt_oss_20b_fits_twice_the_tokens_of_a_full_layout() -> None:
    groups = [replace(group, num_pages=20_000) for group in group_layers(alternating(24), 64)]
    profile = cache_profile(groups, 131_072, 8192)
    assert profile.full_layout_tokens == 20_000 * 64 // 2
    assert 1.99 < profile.context_tokens / profile.full_layout_tokens < 2
    for length, least, most in ((4096, 1.85, 1.95), (660, 1.5, 1.7)):
        gain = cache_profile(groups, length, 8192).context_tokens / profile.full_layout_tokens
        assert least < gain < most, "three pages of a window weigh more in a short sequence"
    said = profile.described()
    for part in (
        "20000 pages of 64 tokens",
        "640000 if every",
        "sliding (window 128): 3 pages, of the full pool 1856 tokens",
        "full (all tokens): 2048 pages, of the full pool 1278080 tokens",
    ):
        assert part in said
    assert profile.pool_bytes == 20_000 * 12 * 2048 * 64


def test_one_full_group_holds_what_its_pages_hold() -> None:
    profile = cache_profile(pool(10, FULL), 100, 8192)
    assert (profile.context_tokens, profile.full_layout_tokens, profile.alone_tokens) == (640, 640, 640)
    assert "if every layer" not in profile.described() and "for 1 group;" in profile.described()
