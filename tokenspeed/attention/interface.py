"""What a layer asks of attention, and what a backend answers.

A backend is one file in this folder with a class that satisfies `AttentionBackend`. `why_not` explains in words why
it cannot serve a need; `plan` runs once a step, `run` once a layer. A backend owns no pages: the KV pool is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

NEEDS_GPU = "it needs an NVIDIA GPU"
"""The `why_not` of every GPU backend on another device: one text, so that a log line says it once."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """Everything that selection depends on.

    Fields:
        device: cpu or cuda.
        window: the shortest of the layers' windows, None when all layers see all; one backend serves every layer.
        has_sinks: `run` will be given sinks.
        logit_cap: `run` will be given this one; None = no cap.
        kv_dtype: of the KV pool; None = dtype.
        capability: of the GPU, (9, 0) for Hopper; None on a CPU.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None
    has_sinks: bool = False
    logit_cap: float | None = None
    kv_dtype: torch.dtype | None = None
    capability: tuple[int, int] | None = None


@dataclass(slots=True)
class AttentionBatch:
    """The step's requests as attention sees them. R requests, T tokens; rows of a request are consecutive.

    Device tensors (valid until the next step's batch is built, in graphs: static buffers):
        query_start: [R + 1] int32, request r owns tokens [query_start[r], query_start[r+1]).
        seq_lens: [R] int32, context length including this step's tokens.
        page_table: [R, max_pages] int32, page ids in position order; entries past the length are undefined, and so are
            those of a sliding-window group before the window of the first of this step's tokens: pages of others.
        slots: [T] int64, where token t's key and value go: page * page_size + offset.
    Host twins (None inside a graph, where only the device knows):
        query_lens_host, seq_lens_host: lists of R ints.
    Cache groups:
        other_groups: the batch of group 1 and up, with `page_table` and `slots` of their own; the rest is shared.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    num_requests: int
    num_tokens: int
    query_lens_host: list[int] | None = None
    seq_lens_host: list[int] | None = None
    other_groups: tuple[AttentionBatch, ...] = ()

    def group(self, index: int) -> AttentionBatch:
        """The same step as cache group `index` sees it: other pages, the same lengths."""
        return self if index == 0 else self.other_groups[index - 1]


class LayerKV(Protocol):
    """One layer's part of the KV pool: keys and values, each [num_pages, page_size, num_kv_heads, head_dim].

    An 8-bit pool holds key / k_scale and value / v_scale; others have scales of 1.
    """

    @property
    def keys(self) -> torch.Tensor: ...

    @property
    def values(self) -> torch.Tensor: ...

    @property
    def k_scale(self) -> float: ...

    @property
    def v_scale(self) -> float: ...


class AttentionBackend(Protocol):
    """One attention implementation.

    Fields:
        can_record: `plan` and `run` may be recorded into a step graph: they read lengths from the device alone.
        note: what a user who gets this backend should know, for the log.
    """

    name: ClassVar[str]
    can_record: ClassVar[bool]
    note: ClassVar[str | None]

    @staticmethod
    def why_not(need: AttentionNeed) -> str | None:
        """None when it can serve the need, otherwise the reason in words."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step (work split, masks). Called once before the layers run."""
        ...

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
        logit_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of this step's queries over the pages (this step's keys and values are already written).

        Args:
            q: [T, num_heads, head_dim].
            scale: factor on the logits, head_dim ** -0.5 as a rule.
            window: tokens visible to a query, itself included; None = all.
            sinks: [num_heads] float32, a logit of each head that joins the softmax's denominator and has no value
                (GPT-OSS); None = no such.
            logit_cap: logits become cap * tanh(logit / cap) before the softmax, sinks stay as they are
                (Gemma 2); None = no cap.
        Returns:
            [T, num_heads * head_dim], dtype of q. Own buffer, valid until the next call in eager mode.
        """
        ...
