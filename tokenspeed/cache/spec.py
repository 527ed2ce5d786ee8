"""What a layer's cache needs, declared by the layer and accounted by the manager.

A *group* is a set of layers whose caches have the same kind and page layout and therefore share one page table a
request. Today every family has one `full` group; sliding-window, latent and state groups get their own numbers and
their own rules about which pages may go, behind the same manager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["full", "sliding_window", "latent", "state"]


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """One layer's cache.

    Fields:
        layer: layer index in the model.
        group: the group's name; layers of one group have equal `kind`, `bytes_per_token` and `window`.
        kind: how pages live: `full` keeps all, `sliding_window` only the last `window` tokens.
        bytes_per_token: keys and values of one token in this layer, on one rank.
        window: tokens a sliding-window layer can see, the current one included; None otherwise.
    """

    layer: int
    group: str
    kind: CacheKind
    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group as the manager sees it: its layers' bytes added up for one page of `page_size` tokens."""

    name: str
    kind: CacheKind
    page_size: int
    page_bytes: int
    num_pages: int
    window: int | None = None


def group_layers(layers: list[LayerCacheSpec], page_size: int) -> list[GroupSpec]:
    """Groups in order of first appearance, with `num_pages` 0 (the runner's memory profile fills it in).

    Raises:
        ValueError: layers of one group disagree in kind or window (a bug of the model file).
    """
    groups: dict[str, GroupSpec] = {}
    for layer in layers:
        page_bytes = layer.bytes_per_token * page_size
        known = groups.get(layer.group)
        if known is None:
            groups[layer.group] = GroupSpec(layer.group, layer.kind, page_size, page_bytes, 0, layer.window)
            continue
        if (known.kind, known.window) != (layer.kind, layer.window):
            raise ValueError(f"layer {layer.layer} disagrees with its cache group {layer.group!r}")
        groups[layer.group] = GroupSpec(
            known.name, known.kind, page_size, known.page_bytes + page_bytes, 0, known.window
        )
    return list(groups.values())
