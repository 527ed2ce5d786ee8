"""Where the time of a start goes: one log line at each phase's start and end, when TOKENSPEED_STARTUP_TIMING=1.

Record: the word `startup_timing`, then compact JSON with phase, pid, rank, role, span_id, parent_id, event and
wall_time_ns. Rank and role (target, draft) are those of the part of the engine that the phase belongs to, null where it
belongs to none (the tokenizer). The end adds duration_s, status (ok, error), error_type, and what Triton compiled
meanwhile in this process (triton_compiles, triton_compile_s; null where nobody counts). Phases nest by context and
overlap between processes: never add them up. Host time only. When off, no clock is read.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

VARIABLE = "TOKENSPEED_STARTUP_TIMING"

LOGGER = "tokenspeed.startup"

logger = logging.getLogger(LOGGER)

_span_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Span:
    """The phase that is running; children take over its rank and role."""

    span_id: int
    rank: int | None
    role: str | None


_current: ContextVar[_Span | None] = ContextVar("startup_phase", default=None)
_is_unrecorded: ContextVar[bool] = ContextVar("startup_unrecorded", default=False)
_compiles: ContextVar[Callable[[], tuple[int, float]] | None] = ContextVar("startup_compiles", default=None)


def count_compiles(totals: Callable[[], tuple[int, float]]) -> None:
    """From now on, in this context, records say what was compiled.

    Args:
        totals: kernels compiled so far by this process, and the seconds that took.
    """
    _compiles.set(totals)


@contextmanager
def unrecorded() -> Iterator[None]:
    """No records in this context: what runs is a rehearsal, and its phases are none of the engine's."""
    token = _is_unrecorded.set(True)
    try:
        yield
    finally:
        _is_unrecorded.reset(token)


@contextmanager
def startup_phase(phase: str, *, rank: int | None = None, role: str | None = None) -> Iterator[None]:
    """Time a phase of the start. Exceptions pass through and are recorded.

    Args:
        phase: name of the public contract where it has one (`model.config`, `weights.read_copy`, `kv.build`).
        rank, role: of this process; None takes over the enclosing phase's.
    """
    if os.environ.get(VARIABLE) != "1" or _is_unrecorded.get():
        yield
        return
    parent = _current.get()
    span = _Span(
        next(_span_ids),
        rank if rank is not None or parent is None else parent.rank,
        role if role is not None or parent is None else parent.role,
    )
    record: dict[str, Any] = {
        "phase": phase,
        "pid": os.getpid(),
        "rank": span.rank,
        "role": span.role,
        "span_id": span.span_id,
        "parent_id": parent.span_id if parent is not None else None,
    }
    started_ns = time.perf_counter_ns()
    compiles = _compiles.get()
    before = compiles() if compiles is not None else None
    token = _current.set(span)
    _log({**record, "event": "start", "wall_time_ns": time.time_ns()})
    error: str | None = None
    try:
        yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        _current.reset(token)
        duration_s = (time.perf_counter_ns() - started_ns) / 1e9
        end = {"duration_s": round(duration_s, 6), "status": "ok" if error is None else "error", "error_type": error}
        end |= _compiled_since(before, compiles)
        _log({**record, "event": "end", "wall_time_ns": time.time_ns(), **end})


def _compiled_since(before: tuple[int, float] | None, totals: Callable[[], tuple[int, float]] | None) -> dict[str, Any]:
    if before is None or totals is None:
        return {"triton_compiles": None, "triton_compile_s": None}
    num_compiled, seconds = totals()
    return {"triton_compiles": num_compiled - before[0], "triton_compile_s": round(seconds - before[1], 6)}


def _log(record: dict[str, Any]) -> None:
    logger.info("startup_timing %s", json.dumps(record, separators=(",", ":")))
