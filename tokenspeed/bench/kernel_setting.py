"""What kernel cases are made of: a case, the setting it is made for, and how much memory its calls spread over.

Each case makes several calls over different memory, 256 MiB together but at most 64 calls: more than a GPU's cache or a
core's own caches hold, so that weights and pages come from memory as they do between the layers of a model. Small
activations stay in the caches, as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.config.model import ModelConfig

CACHE_BYTES = 2**28
MAX_COPIES = 64
EPS = 1e-6

Call = Callable[[], object]


class NotTimed(Exception):
    """This implementation does not take this shape; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape.

    Fields:
        shape: in words.
        rows: tokens.
        num_bytes: what must be read and written. flop: operations.
        make: an implementation's callable -> calls to time. Raises NotTimed.
    """

    op: str
    shape: str
    rows: int
    num_bytes: int
    flop: int
    make: Callable[[Any], list[Call]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the cases are made for.

    Fields:
        context_len: tokens a decoding request has, or has before a chunk of its prompt.
        page_size: tokens a page. kv_dtype: of the pool; None = dtype.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    decode_rows: tuple[int, ...]
    prefill_lens: tuple[int, ...]
    context_len: int
    page_size: int
    kv_dtype: torch.dtype | None = None

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def pool_dtype(self) -> torch.dtype:
        """Of keys and values in the pool."""
        return self.kv_dtype or self.dtype

    def pool(self, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of normal random numbers, each [num_pages, page_size, num_kv_heads, head_dim]."""
        shape = (num_pages, self.page_size, self.config.num_kv_heads, self.config.head_dim)
        keys, values = (self.random(*shape).to(self.pool_dtype) for _ in range(2))
        return keys, values

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (in_features, out_features) of a layer's matrices, and the head."""
        config = self.config
        heads, width = config.num_heads * config.head_dim, (config.num_heads + 2 * config.num_kv_heads)
        found = {"qkv": (config.hidden_size, width * config.head_dim), "o": (heads, config.hidden_size)}
        if config.moe is None or config.moe.dense_layers:
            found["gate_up"] = (config.hidden_size, 2 * config.intermediate_size)
            found["down"] = (config.intermediate_size, config.hidden_size)
        return found | {"head": (config.hidden_size, config.vocab_size)}

    def random(self, *shape: int) -> torch.Tensor:
        """Normal random numbers in the model's dtype."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def copies(self, num_bytes: int) -> range:
        """One index for each copy of inputs of that size."""
        return range(max(1, min(MAX_COPIES, -(-CACHE_BYTES // max(1, num_bytes)))))
