"""Which implementation of each operation serves here, and why not the others.

An implementation is found by discovery: every module below `kernels/` may carry `IMPLEMENTATIONS`. Order of preference
is `rank` (lower first); the reference has the highest rank and never refuses.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import tokenspeed.kernels
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.slot_ops import SlotOps
from tokenspeed.protocol.errors import ConfigError

REQUIRED = ("embedding", "rms_norm", "add_rms_norm", "qkv_rope_cache", "paged_attention", "silu_and_mul", "linear")
OPTIONAL = ("block_linear", "recorder", "fused_linear", "fp8_linear", "route", "experts")
SLOT_OPS = ("decode_inputs", "prefill_inputs", "sample_rows", "redraw_rows")
"""Of a device that keeps requests in slots."""


@dataclass(frozen=True, slots=True)
class Need:
    """What selection depends on. `kv_dtype` is that of the KV pool, None = `dtype`."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None


def nothing_to_say(need: Need) -> Sequence[str]:
    """Of implementations that are the same everywhere."""
    return ()


@dataclass(frozen=True, slots=True)
class Implementation:
    """One implementation of one operation.

    Fields:
        op: field name in `Ops` or `SlotOps`.
        name: `reference`, `torch_cpu`, `native_cpu`, `triton`, ...
        rank: lower is preferred.
        why_not: None when it can serve the need, else the reason in words.
        make: called once, when chosen; returns the callable.
        can_record: False where a call waits for the device: no CUDA graph holds it.
        notes: lines for the log when it is chosen; what several implementations say is said once.
    """

    op: str
    name: str
    rank: int
    why_not: Callable[[Need], str | None]
    make: Callable[[Need], Any]
    can_record: bool = True
    notes: Callable[[Need], Sequence[str]] = nothing_to_say


def discover() -> list[Implementation]:
    """All implementations, best first within an op. A package below `kernels/` that sets `REQUIRES` to an optional
    package's name is passed over where that is not installed."""
    found: list[Implementation] = []
    for name in _modules(tokenspeed.kernels):
        found.extend(getattr(importlib.import_module(name), "IMPLEMENTATIONS", ()))
    return sorted(found, key=lambda implementation: (implementation.op, implementation.rank, implementation.name))


def _modules(package: ModuleType) -> Iterator[str]:
    required = getattr(package, "REQUIRES", None)
    if required is not None and importlib.util.find_spec(required) is None:
        return
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        yield module.name
        if module.ispkg:
            yield from _modules(importlib.import_module(module.name))


def select_ops(need: Need, only: str | None = None) -> tuple[Ops, list[str]]:
    """Choose every operation of a model for a device and dtype.

    Args:
        only: use this implementation name where it exists and the reference elsewhere (tests, comparisons).
    Returns:
        the ops, and lines for the log: of each op the winner, and why better-ranked ones lost (in full where
        a reason comes first); then the winners' notes.
    Raises:
        ConfigError: a required op has no implementation here. Names the op and everyone's reason.
    """
    chosen, report = _choose(REQUIRED, OPTIONAL, need, only)
    return Ops(device=need.device, dtype=need.dtype, kv_dtype=need.kv_dtype or need.dtype, **chosen), report


def select_slot_ops(need: Need, only: str | None = None) -> tuple[SlotOps, list[str]]:
    """The same for the operations on slots."""
    chosen, report = _choose(SLOT_OPS, (), need, only)
    return SlotOps(**chosen), report


def _choose(
    required: Sequence[str], optional: Sequence[str], need: Need, only: str | None
) -> tuple[dict[str, Any], list[str]]:
    candidates: dict[str, list[Implementation]] = {}
    for implementation in discover():
        candidates.setdefault(implementation.op, []).append(implementation)
    chosen: dict[str, Any] = {}
    report: list[str] = []
    notes: list[str] = []
    said: dict[tuple[str, str], str] = {}  # (implementation, reason) -> the op whose line gives it
    for op in (*required, *optional):
        lost: list[str] = []
        for implementation in candidates.get(op, []):
            if only is not None and implementation.name not in (only, "reference"):
                continue
            reason = implementation.why_not(need)
            if reason is None:
                chosen[op] = implementation.make(need)
                report.append(f"{op}: {implementation.name}" + (f" (not {'; '.join(lost)})" if lost else ""))
                notes.extend(implementation.notes(need))
                break
            first = said.setdefault((implementation.name, reason), op)
            lost.append(f"{implementation.name}: {reason if first == op else f'as for {first}'}")
        else:
            if op in required:
                raise ConfigError(f"no implementation of {op} for {need.device} and {need.dtype}: {'; '.join(lost)}")
            chosen[op] = None
            report.append(f"{op}: none" + (f" ({'; '.join(lost)})" if lost else ""))
    return chosen, [*report, *dict.fromkeys(notes)]
