"""Tools of the model tests: weights from a transformers model, a shuffled page pool, and steps over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model
from tokenspeed.quantization import interface
from tokenspeed.quantization.select import scheme_for

CPU = torch.device("cpu")


@dataclass
class FakeWeight:
    """A `WeightTensor` over a tensor in memory."""

    name: str
    tensor: torch.Tensor
    qtype: str | None = None

    @property
    def where(self) -> str:
        return f"memory: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, dtype: torch.dtype, device: torch.device = interface.CPU) -> torch.Tensor:
        return self.tensor.to(device, dtype, copy=True)

    def raw(self) -> torch.Tensor:
        raise AssertionError("not quantized")


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
        slots: list[int] = []
        query_lens: list[int] = []
        seq_lens: list[int] = []
        for sequence, count in work:
            start, end = sequence.num_computed, sequence.num_computed + count
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [
                sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, end)
            ]
            query_lens.append(count)
            seq_lens.append(end)
            sequence.num_computed = end
        width = max(len(sequence.pages) for sequence, _ in work)
        table = torch.full((len(work), width), 2**30, dtype=torch.int32)  # past the length: must never be read
        for row, (sequence, _) in enumerate(work):
            used = -(-seq_lens[row] // self.page_size)
            table[row, :used] = torch.tensor(sequence.pages[:used], dtype=torch.int32)
        batch = AttentionBatch(
            query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=table,
            slots=torch.tensor(slots),
            num_requests=len(work),
            num_tokens=len(ids),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), batch)
        return list(self.model.logits(hidden).split(query_lens))

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Prefill in one step, then one token a step."""
        sequence = self.add(prompt, len(prompt) + num_tokens)
        logits = self.step([(sequence, len(prompt))])[0]
        for _ in range(num_tokens):
            sequence.tokens.append(int(logits[-1].argmax()))
            logits = self.step([(sequence, 1)])[0]
        return sequence.tokens[len(prompt) :]


def build_unloaded(
    config: ModelConfig, page_size: int, dtype: torch.dtype = torch.float32, only: str | None = None
) -> Model:
    """The model as the runner would build it."""
    ops, _ = select_ops(Need(CPU, dtype), only)
    need = AttentionNeed("cpu", dtype, config.num_heads, config.num_kv_heads, config.head_dim, page_size)
    backend, _ = select_backend(need, "auto", ops)
    return build_model(config, SINGLE, scheme_for(config, ops), ops, backend)


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
    return Engine(model, config, page_size, order)


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
        rule(FakeWeight(name, state[name]))
    assert all(model.ignorable(name) for name in state.keys() - rules.keys())
    model.finish()
    return with_pool(model, config, page_size, num_pages, dtype)
