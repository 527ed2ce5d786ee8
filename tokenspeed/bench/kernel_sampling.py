"""Cases of drawing one token a row for `kernel_cases`: greedy, and with the filters of most chats.

A CPU's engine draws by the functions of `sampling.filters`, with other random numbers: named here as an implementation
beside those of the registry, which keep requests in slots. The registry's reference is not timed: no engine draws by
it, and it takes 25 ms a row on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed.bench.kernel_setting import Call, Case, Setting
from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.slot_ops import SampleRows, SlotSampling
from tokenspeed.sampling.filters import DrawParams, draw

SAMPLING = "sample_rows"
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


def sampling_cases(at: Setting, rows: int, is_decode: bool) -> Iterator[Case]:
    """Of `rows` requests; of a prompt there is one row, as of one decode."""
    vocab = at.config.vocab_size
    num_bytes = rows * vocab * at.element_bytes

    def make(op: SampleRows, filters: Filters) -> list[Call]:
        # A CPU takes milliseconds a row, whether or not the logits come from memory: one call says it.
        copies = range(1) if at.device.type == "cpu" else at.copies(num_bytes)
        return [_call(op, at.random(rows, vocab) * DEVIATION, filters) for _ in copies]

    for filters in KINDS if is_decode else ():
        yield Case(SAMPLING, f"{vocab}, {filters}", rows, num_bytes, 0, partial(make, filters=filters))


def _call(op: SampleRows, logits: torch.Tensor, filters: Filters) -> Call:
    """What draws a token a row from logits [R, V]."""
    rows, device = len(logits), logits.device
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
    return partial(op, logits, slots, positions, sampling, token_ids)


def _torch_cpu(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """As `sampling.sampler` draws; every row by the same number."""
    if not bool(sampling.temperature.any()):
        drawn = logits.argmax(-1)
    else:
        params = DrawParams(
            temperature=sampling.temperature.tolist(),
            top_k=sampling.top_k.tolist(),
            top_p=sampling.top_p.tolist(),
            min_p=sampling.min_p.tolist(),
            uniform=[0.5] * len(logits),
        )
        drawn = draw(logits.float(), params)
    token_ids[slots.long(), positions] = drawn
    return drawn.int()


def only_compared(implementation: Implementation) -> str | None:
    """Why an implementation is not timed although it serves; None for those that engines may use."""
    if (implementation.op, implementation.name) == (SAMPLING, "reference"):
        return "it exists for comparison, no engine draws by it"
    return None


def _why_not_torch(need: Need) -> str | None:
    return None if need.device.type == "cpu" else f"it works in a CPU's memory, the device is {need.device.type}"


SAMPLERS = (Implementation(SAMPLING, "torch_cpu", 100, _why_not_torch, lambda need: _torch_cpu),)
