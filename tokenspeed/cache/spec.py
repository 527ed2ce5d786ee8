"""What a layer's cache needs, declared by the layer and accounted by the manager.

A *group* is a set of layers whose caches live by the same rule and therefore share one page list a request. All groups
of a model draw from ONE pool of pages, so that memory goes to whichever group needs it. A page holds `page_size` tokens
of one group: its i-th layer uses the i-th *storage* of the page. With 12 sliding and 12 full layers:

    storages     0 ... 11       12 allocations of [num_pages, page_size, ...]
    page 5       held by group "full":     the keys and values of layers 1, 3, ... 23 in storages 0 ... 11
    page 6       held by group "sliding":  those of layers 0, 2, ... 22 in storages 0 ... 11

Latent and state groups get rules of their own behind the same manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["full", "sliding_window", "latent", "state"]

GONE = -1
"""Stands in a group's page list where a page has left the window: no layer of the group ever reads those tokens again.
Whoever needs a page number there (a page table on the device) may write any page's."""


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """One layer's cache.

    Fields:
        layer: layer index in the model.
        group: the group's name; layers of one group have equal `kind` and `window`.
        kind: how pages live: `full` keeps all, `sliding_window` only the last `window` tokens.
        bytes_per_token: keys and values of one token in this layer, on one rank; equal in all layers of a model.
        window: tokens a sliding-window layer can see, the current one included; None otherwise.
    """

    layer: int
    group: str
    kind: CacheKind
    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group as the manager sees it.

    Fields:
        page_bytes: bytes of a page over all storages; the same in all groups.
        num_pages: pages of the one pool; the same in all groups.
    """

    name: str
    kind: CacheKind
    page_size: int
    page_bytes: int
    num_pages: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's keys and values are: which group's pages, and which storage of those pages."""

    group: int
    storage: int


def layer_places(layers: list[LayerCacheSpec]) -> list[LayerPlace]:
    """The place of each layer, in the order of `layers`. Groups count as in `group_layers`."""
    sizes: dict[str, int] = {}
    places = []
    for layer in layers:
        storage = sizes.setdefault(layer.group, 0)
        sizes[layer.group] += 1
        places.append(LayerPlace(list(sizes).index(layer.group), storage))
    return places


def num_storages(layers: list[LayerCacheSpec]) -> int:
    """Storages of a page: the layers of the largest group. Smaller groups leave the last ones unused."""
    return 1 + max((place.storage for place in layer_places(layers)), default=-1)


def group_layers(layers: list[LayerCacheSpec], page_size: int) -> list[GroupSpec]:
    """Groups in order of first appearance, with `num_pages` 0 (the runner's memory profile fills it in).

    Raises:
        ValueError: layers of one group disagree in kind or window, a window is missing where one is needed, or layers
            have different bytes per token, so that no page could serve all groups (bugs of the model file).
    """
    groups: dict[str, LayerCacheSpec] = {}
    for layer in layers:
        first = groups.setdefault(layer.group, layer)
        if (first.kind, first.window) != (layer.kind, layer.window):
            raise ValueError(f"layer {layer.layer} disagrees with its cache group {layer.group!r}")
        if (layer.kind == "sliding_window") != (layer.window is not None and layer.window >= 1):
            raise ValueError(f"layer {layer.layer} is of kind {layer.kind!r} and has a window of {layer.window}")
        if layer.bytes_per_token != layers[0].bytes_per_token:
            raise ValueError(
                f"layer {layer.layer} has {layer.bytes_per_token} bytes per token, layer {layers[0].layer} has "
                f"{layers[0].bytes_per_token}; one pool of pages needs equal layers"
            )
    page_bytes = num_storages(layers) * layers[0].bytes_per_token * page_size if layers else 0
    return [GroupSpec(one.group, one.kind, page_size, page_bytes, 0, one.window) for one in groups.values()]
