"""What a mixture-of-experts layer asks of its three parts, and what a backend of expert kernels answers.

    route     x [T, H] -> the experts of every token and their weights        (op `route`)
    dispatch  tokens to the ranks that hold their experts, results back       (`Dispatch`)
    experts   out[t] = sum over k of weight[t, k] * expert[ids[t, k]](x[t])   (`MoeBackend`)

A backend is one file in this folder with a class that satisfies `MoeBackend` (our own two share one). `why_not` says in
words why it cannot serve a need. Weights come in one canonical order, whatever the checkpoint's; a backend repacks them
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

ExpertFormat = Literal["dense", "mxfp4", "fp8_block"]
"""How the experts' matrices are stored: in the model's dtype; E2M1 in blocks of 32 with E8M0 scales (OCP MX 1.0); e4m3
with a float32 scale for each block of 128 x 128."""

Scoring = Literal["softmax_topk", "topk_softmax"]
"""softmax over all experts, then the top k (Qwen3 MoE); top k of the logits, then softmax over those (GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Between the two matrices of an expert, in float32: gate g, up u -> h.

    limit None:  h = g sigmoid(g) u                                                      (SwiGLU, Shazeer 2020)
    limit L:     g = min(g, L), u = clamp(u, -L, L);  h = g sigmoid(alpha g) (u + 1)     (GPT-OSS model card)
    """

    limit: float | None = None
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How scores become experts. `renormalize`: the k weights are divided by their sum (softmax_topk only).

    Ties go to the lower expert number.
    """

    top_k: int
    scoring: Scoring
    renormalize: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """Where T tokens go: expert_ids [T, k] int32, best first; weights [T, k] float32. Own buffers, valid until the
    next call in eager mode."""

    expert_ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routed:
    """Normed tokens [T, H] and where they go."""

    x: torch.Tensor
    routing: Routing


class Dispatch(Protocol):
    """Brings tokens to their experts and results back, in a layer of one rank."""

    @property
    def can_add(self) -> bool:
        """Results are whole and may be added to the residual stream where they are made, without `collect`."""
        ...

    def send(self, routed: Routed) -> Routed:
        """This rank's tokens -> those that its experts compute."""
        ...

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """What this rank's experts gave -> the results of its tokens, [T, H]; y may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class MoeNeed:
    """Everything that selection depends on; sizes are of one rank."""

    device: str
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    format: ExpertFormat
    has_bias: bool
    activation: Activation


@dataclass(slots=True)
class ExpertWeights:
    """E experts as loaded, on the device. H hidden size, I intermediate size of this rank.

    Rows of `gate_up` are interleaved: row 2i is gate i, row 2i + 1 is up i, whatever the checkpoint's order.

    dense      gate_up [E, 2I, H], down [E, H, I] in the model's dtype; scales None
    mxfp4      gate_up [E, 2I, H / 2], down [E, H, I / 2] uint8, two values a byte, the low nibble first;
               scales [E, 2I, H / 32], [E, H, I / 32] uint8, 2 ** (scale - 127)
    fp8_block  gate_up [E, 2I, H], down [E, H, I] float8_e4m3fn; scales float32 as the checkpoint has them, a block of
               128 rows before interleaving: gate [E, ceil(I / 128), ceil(H / 128)] then up, joined along rows; down
               [E, ceil(H / 128), ceil(I / 128)]
    Biases: gate_up [E, 2I], down [E, H] in the model's dtype, or None. Where several ranks share an expert's columns,
    only the first has the down bias.
    """

    format: ExpertFormat
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class Experts(Protocol):
    """One layer's experts, packed by a backend; see `MoeBackend.pack`."""

    @property
    def max_fused_rows(self) -> int:
        """Tokens up to which `residual` costs no launch of its own."""
        ...

    def __call__(self, x: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        """out[t] = sum over k of weights[t, k] * expert(x[t]), any T >= 0; recordable, never waits for the device.

        Args:
            x: [T, H], normed.
            residual: [T, H]; the sum is added to it in place and it is returned. None = a new [T, H].
        """
        ...


class MoeBackend(Protocol):
    """One implementation of experts."""

    name: ClassVar[str]

    @classmethod
    def why_not(cls, need: MoeNeed) -> str | None:
        """None when it can serve the need, otherwise the reason in words."""
        ...

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> Experts:
        """Take over one layer's weights, once after the load. What is not needed as it came is freed."""
        ...
