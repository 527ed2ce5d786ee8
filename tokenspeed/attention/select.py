"""Which attention backend serves a need, and why not the others.

Names of the public contract that have no implementation here are known by name, so that a user who asks for one hears
the reason instead of "unknown".
"""

from __future__ import annotations

from tokenspeed.attention.interface import AttentionBackend, AttentionNeed
from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.kernels.ops import Ops
from tokenspeed.protocol.errors import ConfigError

AUTO = "auto"

BACKENDS = (PagedAttentionBackend,)
"""In order of preference."""

CONTRACT_ONLY = {
    "mha": "its kernels need a CUDA device and are not part of this version",
    "mla": "multi-head latent attention models are not part of this version",
    "fa3": "FlashAttention 3 needs an NVIDIA Hopper GPU and is not part of this version",
    "fa4": "FlashAttention 4 needs an NVIDIA GPU and is not part of this version",
    "triton": "Triton kernels need a GPU and are not part of this version",
    "flashinfer": "FlashInfer needs an NVIDIA GPU and is not part of this version",
    "trtllm": "TensorRT-LLM kernels need an NVIDIA Blackwell GPU and are not part of this version",
    "trtllm_mha": "alias of trtllm, which needs an NVIDIA Blackwell GPU and is not part of this version",
    "trtllm_mla": "TensorRT-LLM kernels need an NVIDIA Blackwell GPU and are not part of this version",
    "flashmla": "FlashMLA needs an NVIDIA GPU and is not part of this version",
    "tokenspeed_mla": "multi-head latent attention models are not part of this version",
    "hybrid_linear_attn": "hybrid linear-attention models are not part of this version",
}
"""Backend names of the public contract that cannot run in this version: name -> reason."""


def select_backend(need: AttentionNeed, choice: str, ops: Ops) -> tuple[AttentionBackend, list[str]]:
    """The backend for a need, and the lines for the log.

    Args:
        choice: a backend's name, or `auto`.
    Raises:
        ConfigError: the choice is unknown or cannot serve the need (the message names what would), or nothing can.
    """
    reasons = {backend.name: backend.why_not(need) for backend in BACKENDS}
    usable = [backend for backend in BACKENDS if reasons[backend.name] is None]
    would = ", ".join([AUTO, *(backend.name for backend in usable)])
    if choice != AUTO:
        chosen = next((backend for backend in usable if backend.name == choice), None)
        if chosen is not None:
            return chosen(ops), [f"attention: {choice} (asked for)"]
        reason = CONTRACT_ONLY.get(choice) or reasons.get(choice) or "there is no backend of this name"
        if not usable:
            raise ConfigError(
                f"--attention-backend {choice}: {reason}; no backend can serve this model: {_all(reasons)}"
            )
        raise ConfigError(f"--attention-backend {choice} cannot run on {need.device}: {reason}; use one of: {would}")
    if not usable:
        raise ConfigError(f"no attention backend can serve this model on {need.device}: {_all(reasons)}")
    winner = usable[0]
    lost = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    return winner(ops), [f"attention: {winner.name}" + (f" (not {'; '.join(lost)})" if lost else "")]


def _all(reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
