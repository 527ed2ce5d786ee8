"""Cases of drawing one token a row for `kernel_cases`: greedy, and with the filters of most chats.

No operation of the registry: a GPU's steps draw by `kernels.triton.sampling`, a CPU's by the functions of
`sampling.filters`. So both are named as implementations here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch

from tokenspeed.bench.kernel_setting import Call, Case, Setting
from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.sampling.filters import DrawParams, draw

SAMPLING = "sampling"
DEVIATION = 4.0
"""Of the normal logits: about as peaked as a language model that is in doubt."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Of every row: see `SamplingParams`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        shown = (f"top_k {self.top_k}" if self.top_k else "", f"top_p {self.top_p}" if self.top_p < 1 else "")
        return ", ".join(name for name in shown if name) or "no filter"


KINDS = (Filters(0.0), Filters(1.0), Filters(0.7, top_k=20, top_p=0.95), Filters(0.7, top_p=0.95))


class Draw(Protocol):
    """What an implementation is, once made."""

    def __call__(self, logits: torch.Tensor, filters: Filters) -> Call:
        """logits [R, V] -> what draws a token a row from them."""
        ...


def sampling_cases(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """Of `rows` requests; of a prompt there is one row, as of one decode."""
    vocab = at.config.vocab_size
    num_bytes = rows * vocab * at.element_bytes

    def make(op: Draw, filters: Filters) -> list[Call]:
        return [op(at.random(rows, vocab) * DEVIATION, filters) for _ in at.copies(num_bytes)]

    for filters in KINDS if is_decode else ():
        yield Case(SAMPLING, f"{vocab}, {filters}", rows, num_bytes, 0, partial(make, filters=filters))


def _torch(logits: torch.Tensor, filters: Filters) -> Call:
    rows = len(logits)
    if filters.temperature == 0:
        return partial(torch.argmax, logits, -1)
    params = DrawParams(
        [filters.temperature] * rows, [filters.top_k] * rows, [filters.top_p] * rows, [0.0] * rows, [0.5] * rows
    )
    return lambda: draw(logits.float(), params)


def _make_triton(need: Need) -> Draw:
    # Triton is an optional dependency.
    from tokenspeed.kernels.triton.registered import has_pdl
    from tokenspeed.kernels.triton.sampling import SlotSampling, sample_rows

    pdl = has_pdl(need.device)

    def prepare(logits: torch.Tensor, filters: Filters) -> Call:
        rows, device = len(logits), need.device
        sampling = SlotSampling(
            temperature=torch.full((rows,), filters.temperature, device=device),
            top_p=torch.full((rows,), filters.top_p, device=device),
            min_p=torch.zeros(rows, device=device),
            top_k=torch.full((rows,), filters.top_k, dtype=torch.int32, device=device),
            seed=torch.arange(rows, device=device),
        )
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        token_ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return partial(sample_rows, logits, slots, positions, sampling, token_ids, pdl)

    return prepare


def _why_not_triton(need: Need) -> str | None:
    if need.device.type != "cuda":
        return f"Triton kernels run on a GPU, the device is {need.device.type}"
    return None if find_spec("triton") else "the package triton is not installed"


def _why_not_torch(need: Need) -> str | None:
    return None if need.device.type == "cpu" else f"it works in a CPU's memory, the device is {need.device.type}"


SAMPLERS = (
    Implementation(SAMPLING, "triton", 50, _why_not_triton, _make_triton),
    Implementation(SAMPLING, "torch", 100, _why_not_torch, lambda need: _torch),
)
