"""Which attention backend serves a need, and why not the others.

`auto` goes by measurement: on a GPU our Triton kernels, which the benchmarks of docs/log.md were made with; an adapter
comes before them when it has been measured to be faster, and none has. Names of the public contract that have no
implementation are known by name, so that a user who asks for one hears the reason instead of "unknown".
"""

from __future__ import annotations

from tokenspeed.attention.fa3 import FlashAttention3Backend
from tokenspeed.attention.fa4 import FlashAttention4Backend
from tokenspeed.attention.flashinfer import FlashInferBackend
from tokenspeed.attention.interface import AttentionBackend, AttentionNeed
from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.attention.triton import TritonAttentionBackend
from tokenspeed.config.attention_choices import NAMES
from tokenspeed.config.backend_names import AUTO, grouped
from tokenspeed.kernels.ops import Ops

Backend = (
    type[TritonAttentionBackend]
    | type[PagedAttentionBackend]
    | type[FlashAttention3Backend]
    | type[FlashAttention4Backend]
    | type[FlashInferBackend]
)

BACKENDS: tuple[Backend, ...] = (
    TritonAttentionBackend,
    PagedAttentionBackend,
    FlashAttention3Backend,
    FlashAttention4Backend,
    FlashInferBackend,
)
"""In order of preference."""


def select_backend(need: AttentionNeed, choice: str, ops: Ops) -> tuple[AttentionBackend, list[str]]:
    """The backend for a need, and the lines for the log.

    Args:
        choice: a backend's name, or `auto`.
    Raises:
        ConfigError: the choice is unknown or cannot serve the need (the message names what would), or nothing can.
    """
    reasons = {backend.name: backend.why_not(need) for backend in BACKENDS}
    name = NAMES.select(choice, need.device, reasons)
    (chosen,) = (backend for backend in BACKENDS if backend.name == name)
    if choice != AUTO:
        return chosen(ops), [f"attention: {name} (asked for)" + _noted(chosen)]
    others = {other: reason or f"not measured to be faster than {name}" for other, reason in reasons.items()}
    del others[name]
    return chosen(ops), [f"attention: {name} (not {grouped(others)})" + _noted(chosen)]


def _noted(backend: Backend) -> str:
    return "" if backend.note is None else f"; {backend.note}"
