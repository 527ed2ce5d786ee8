"""Cases of `route` and `experts` for `kernel_cases`: sparse layers with uniformly random routing.

The bound counts the weights of the distinct experts that are expected once: E (1 - (1 - k / E)^T) of E.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tokenspeed.bench.expert_inputs import random_routing, random_weights
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.ops import ExpertKernels, Route
from tokenspeed.moe.interface import Activation, ExpertFormat, MoeNeed, RouterRule

MAX_LAYERS = 4
"""Layers of experts that calls take turns with: hundreds of MiB each."""

Call = Callable[[], object]


def expert_format(config: ModelConfig) -> ExpertFormat:
    """How a model's checkpoint stores its experts, as the loader would keep them."""
    found = config.quantization
    if found is None:
        return "dense"
    if found.method == "mxfp4":
        return "mxfp4"
    return "fp8_block" if found.granularity == "block" else "dense"


def moe_need(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> MoeNeed | None:
    """What one rank alone asks of the experts, or None for a model without."""
    moe = config.moe
    if moe is None:
        return None
    return MoeNeed(
        device=device.type,
        dtype=dtype,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=moe.intermediate_size,
        format=expert_format(config),
        has_bias=moe.expert_bias,
        activation=Activation(moe.limit, moe.alpha),
    )


def described(need: MoeNeed) -> str:
    """For a table: `mxfp4 4 of 32, 2880 x 2880`."""
    return f"{need.format} {need.top_k} of {need.num_experts}, {need.hidden_size} x {need.intermediate_size}"


def weight_bytes(need: MoeNeed) -> float:
    """Of one expert, without its biases."""
    per_value = {"dense": float(need.dtype.itemsize), "mxfp4": 17 / 32, "fp8_block": 1.0}[need.format]
    return 3 * need.hidden_size * need.intermediate_size * per_value


def experts_bytes(need: MoeNeed, num_tokens: int) -> int:
    """Weights of the expected distinct experts, and tokens in and out."""
    distinct = need.num_experts * (1 - (1 - need.top_k / need.num_experts) ** num_tokens)
    return int(distinct * weight_bytes(need)) + 2 * num_tokens * need.hidden_size * need.dtype.itemsize


def experts_flop(need: MoeNeed, num_tokens: int) -> int:
    return 6 * num_tokens * need.top_k * need.hidden_size * need.intermediate_size


def experts_calls(
    op: ExpertKernels, need: MoeNeed, num_tokens: int, num_calls: int, device: torch.device
) -> list[Call] | str:
    """Calls over a few layers of distinct weights, each with its own tokens; or why there are none."""
    if (reason := op.why_not(need)) is not None:
        return reason
    layers = [op.pack(random_weights(need, device), need) for _ in range(min(num_calls, MAX_LAYERS))]
    calls: list[Call] = []
    for place in range(num_calls):
        x = torch.randn(num_tokens, need.hidden_size, device=device).to(need.dtype)
        calls.append(partial(layers[place % len(layers)], x, random_routing(need, num_tokens, device), None))
    return calls


def route_calls(
    op: Route, config: ModelConfig, need: MoeNeed, num_tokens: int, num_calls: int, device: torch.device
) -> list[Call]:
    """Routers with the norm before, where that costs no launch of its own."""
    moe = config.moe
    assert moe is not None, "a model without experts has no router"
    rule = RouterRule(moe.top_k, moe.scoring, moe.renormalize)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(need.dtype)

    calls: list[Call] = []
    for _ in range(num_calls):
        norm: Any = random(config.hidden_size) if num_tokens <= op.max_fused_rows else None
        bias = random(moe.num_experts) if moe.router_bias else None
        x, weight = random(num_tokens, config.hidden_size), random(moe.num_experts, config.hidden_size)
        calls.append(partial(op, x, weight, bias, rule, norm=norm, eps=config.rms_norm_eps))
    return calls
