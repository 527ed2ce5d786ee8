"""Tools of the model tests: weights from a transformers model, a shuffled page pool, and steps over it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from memory_weight import MemoryWeight

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.cache.spec import group_layers
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.quantization.select import scheme_for

CPU = torch.device("cpu")


@dataclass
class Pages:
    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass
class Sequence:
    """One request's tokens, how many of them are in the cache, and its page ids in position order."""

    tokens: list[int]
    pages: list[int]
    num_computed: int = 0


@dataclass
class Engine:
    """A model with a pool whose page ids are handed out in shuffled order; `step` runs chunks of several sequences."""

    model: Model
    config: ModelConfig
    page_size: int
    free: list[int]
    num_pages: int
    windows: list[int | None]

    def add(self, tokens: list[int], capacity: int) -> Sequence:
        num_pages = -(-capacity // self.page_size)
        return Sequence(list(tokens), [self.free.pop() for _ in range(num_pages)])

    def release(self, sequence: Sequence) -> None:
        self.free += sequence.pages

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Compute the next `count` tokens of each sequence; logits [count, V] of each."""
        ids: list[int] = []
        positions: list[int] = []
        query_lens: list[int] = []
        seq_lens: list[int] = []
        for sequence, count in work:
            start, end = sequence.num_computed, sequence.num_computed + count
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            query_lens.append(count)
            seq_lens.append(end)
            sequence.num_computed = end
        groups = [self._group(index, work, seq_lens, query_lens) for index in range(len(self.windows))]
        batch = AttentionBatch(
            query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=groups[0][0],
            slots=groups[0][1],
            num_requests=len(work),
            num_tokens=len(ids),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        batch.other_groups = tuple(replace(batch, page_table=table, slots=slots) for table, slots in groups[1:])
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), batch)
        return list(self.model.logits(hidden).split(query_lens))

    def _group(
        self, index: int, work: list[tuple[Sequence, int]], seq_lens: list[int], query_lens: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page table and slots of a cache group; every group has pages of its own."""
        size, slots = self.page_size, []
        width = max(len(sequence.pages) for sequence, _ in work)
        table = torch.full((len(work), width), 2**30, dtype=torch.int32)  # what must never be read
        for row, (sequence, _) in enumerate(work):
            pages = [(page + 5 * index) % self.num_pages for page in sequence.pages]
            start, end = seq_lens[row] - query_lens[row], seq_lens[row]
            slots += [pages[p // size] * size + p % size for p in range(start, end)]
            window = self.windows[index]
            first = 0 if window is None else max(0, start + 1 - window) // size
            table[row, first : -(-end // size)] = torch.tensor(pages[first : -(-end // size)], dtype=torch.int32)
        return table, torch.tensor(slots)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Prefill in one step, then one token a step."""
        sequence = self.add(prompt, len(prompt) + num_tokens)
        logits = self.step([(sequence, len(prompt))])[0]
        for _ in range(num_tokens):
            sequence.tokens.append(int(logits[-1].argmax()))
            logits = self.step([(sequence, 1)])[0]
        return sequence.tokens[len(prompt) :]


def build_unloaded(
    config: ModelConfig,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    only: str | None = None,
    quantize: Literal["fp8"] | None = None,
) -> Model:
    """The model as the runner would build it."""
    ops, _ = select_ops(Need(CPU, dtype), only)
    window = next((window for window in config.layer_windows if window is not None), None)
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    need = AttentionNeed("cpu", dtype, *heads, page_size, window, config.attention_sinks)
    backend, _ = select_backend(need, "auto", ops)
    scheme = scheme_for(config, ops, quantize)
    moe = None
    if config.moe is not None:
        moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
    return build_model(config, SINGLE, scheme, ops, backend, moe)


def with_pool(model: Model, config: ModelConfig, page_size: int, num_pages: int, dtype: torch.dtype) -> Engine:
    """Bind a pool filled with NaN, so that reading a slot that was never written shows."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
    model.bind_kv(
        [
            Pages(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(config.num_layers)
        ]
    )
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    windows = [group.window for group in group_layers(model.cache_specs(), page_size)]
    return Engine(model, config, page_size, order, num_pages, windows)


def engine(
    config: ModelConfig,
    state: dict[str, torch.Tensor],
    page_size: int = 4,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    only: str | None = None,
) -> Engine:
    """A loaded model. Every expected tensor is fed once; what is left over must be ignorable."""
    model = build_unloaded(config, page_size, dtype, only)
    rules = model.load_rules()
    for name, rule in rules.items():
        rule(MemoryWeight(name, state[name]))
    assert all(model.ignorable(name) for name in state.keys() - rules.keys())
    model.finish()
    return with_pool(model, config, page_size, num_pages, dtype)
