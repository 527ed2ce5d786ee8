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
from tokenspeed.config.attention_choices import WITHOUT_IMPLEMENTATION
from tokenspeed.config.backend_names import AUTO
from tokenspeed.kernels.ops import Ops
from tokenspeed.protocol.errors import ConfigError

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
    usable = [backend for backend in BACKENDS if reasons[backend.name] is None]
    if choice != AUTO:
        chosen = next((backend for backend in usable if backend.name == choice), None)
        if chosen is not None:
            return chosen(ops), [f"attention: {choice} (asked for)" + _noted(chosen)]
        reason = WITHOUT_IMPLEMENTATION.get(choice) or reasons.get(choice) or "there is no backend of this name"
        if not usable:
            raise ConfigError(
                f"--attention-backend {choice}: {reason}; no backend can serve this model: {_lost(reasons)}"
            )
        would = ", ".join([AUTO, *(backend.name for backend in usable)])
        raise ConfigError(f"--attention-backend {choice} cannot run on {need.device}: {reason}; use one of: {would}")
    if not usable:
        raise ConfigError(f"no attention backend can serve this model on {need.device}: {_lost(reasons)}")
    winner, *others = usable
    for backend in others:
        reasons[backend.name] = f"not measured to be faster than {winner.name}"
    return winner(ops), [f"attention: {winner.name} (not {_lost(reasons)})" + _noted(winner)]


def _noted(backend: Backend) -> str:
    return "" if backend.note is None else f"; {backend.note}"


def _lost(reasons: dict[str, str | None]) -> str:
    """Who lost and why, those of one reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(group)}: {reason}" for reason, group in names.items())
