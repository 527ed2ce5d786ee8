"""What the runner and the loader ask of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tokenspeed.attention.interface import AttentionBatch, LayerKV
from tokenspeed.cache.spec import LayerCacheSpec
from tokenspeed.quantization.interface import WeightTensor

LoadRule = Callable[[WeightTensor], None]


class Model(Protocol):
    """A decoder. Built by its file's class as `registry.Build` says, with nothing loaded."""

    def load_rules(self) -> dict[str, LoadRule]:
        """HF tensor name -> what to do with it. Every name must come exactly once, or the loader reports it missing."""
        ...

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF tensor name -> logical shape in the checkpoint (whole, not this rank's part); same keys as `load_rules`.

        The loader compares it with the files' headers before it reads or allocates anything, and makes random weights
        from it.
        """
        ...

    def raw_names(self) -> frozenset[str]:
        """Tensors that are read as bytes (uint8): blocks and scales of MXFP4 experts. All others hold numbers."""
        ...

    def ignorable(self, name: str) -> bool:
        """True for a checkpoint tensor that this model knows and does not need (rotary tables, a tied head)."""
        ...

    def finish(self) -> None:
        """After the last load: repack, tie, build tables."""
        ...

    def cache_specs(self) -> list[LayerCacheSpec]:
        """One a layer that keeps keys and values."""
        ...

    def bind_kv(self, pool: list[LayerKV]) -> None:
        """Give each layer its part of the KV pool; entry i belongs to layer i."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: [T] int64 -> hidden states after the final norm, [T, hidden_size].

        Writes this step's keys and values into the pool. Records into a step graph when the runner captures (on a CPU
        without `wanted`).

        Args:
            wanted: [N] int64, the tokens whose hidden states are asked for; the result is then [N, hidden_size] and the
                last layer computes no more than those beyond its keys and values. None = all.
        """
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size] in the head's own dtype; recordable."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head` in float32."""
        ...
