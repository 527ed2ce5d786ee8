"""The router and expert ops of the reference and the CPU, against formulas written out token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tokenspeed.kernels.reference import mxfp4
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.moe.interface import Activation, ExpertFormat, ExpertWeights, MoeNeed, RouterRule, Routing
from tokenspeed.quantization.fp8_format import quantize_blocks

E, H, INNER, TOP_K = 6, 64, 160, 3
CLAMPED, PLAIN = Activation(2.0, 1.702), Activation()
ONLY = pytest.mark.parametrize("only", ["reference", "torch_cpu"])


def ops_of(only: str, dtype: torch.dtype = torch.float32):
    return select_ops(Need(torch.device("cpu"), dtype), only)[0]


def draw(*sizes: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)) * std


def experts_of(format: ExpertFormat, has_bias: bool) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    """Weights as a layer holds them, and the same dense: gate_up [E, 2 I, H], interleaved, and down [E, H, I]."""
    gate_up, down = draw(E, 2 * INNER, H, seed=1, std=0.2), draw(E, H, INNER, seed=2, std=0.2)
    biases = (draw(E, 2 * INNER, seed=3), draw(E, H, seed=4)) if has_bias else (None, None)
    if format == "dense":
        return ExpertWeights(format, gate_up, down, None, None, *biases), gate_up, down
    if format == "mxfp4":
        packed, scale = mxfp4.quantize(gate_up)
        packed_down, down_scale = mxfp4.quantize(down)
        weights = ExpertWeights(format, packed, packed_down, scale, down_scale, *biases)
        return weights, naive_mxfp4(packed, scale), naive_mxfp4(packed_down, down_scale)
    halves = [[quantize_blocks(gate_up[e, half::2]) for half in (0, 1)] for e in range(E)]
    downs = [quantize_blocks(down[e]) for e in range(E)]
    kept = torch.stack([torch.stack([g.weight, u.weight], 1).view(2 * INNER, H) for g, u in halves])
    scales = torch.stack([torch.cat([g.scale, u.scale]) for g, u in halves])
    dense = torch.stack(
        [torch.stack([g.dequantize(torch.float32), u.dequantize(torch.float32)], 1).view(-1, H) for g, u in halves]
    )
    weights = ExpertWeights(
        format, kept, torch.stack([d.weight for d in downs]), scales, torch.stack([d.scale for d in downs]), *biases
    )
    return weights, dense, torch.stack([d.dequantize(torch.float32) for d in downs])


def naive_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Value by value, from the bits."""
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    exponent, mantissa, sign = (nibbles >> 1) & 3, nibbles & 1, 1 - 2 * (nibbles >> 3)
    value = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1).clamp(min=0))
    return sign * value * 2.0 ** (scale.double() - 127).repeat_interleave(32, -1).float()


def need_of(format: ExpertFormat, has_bias: bool, activation: Activation, dtype=torch.float32) -> MoeNeed:
    return MoeNeed("cpu", dtype, E, TOP_K, H, INNER, format, has_bias, activation)


def naive_experts(x, routing, gate_up, down, weights, activation) -> torch.Tensor:
    out = torch.zeros(x.shape[0], H)
    for t in range(x.shape[0]):
        for k in range(routing.expert_ids.shape[1]):
            e = int(routing.expert_ids[t, k])
            inner = gate_up[e] @ x[t] + (0 if weights.gate_up_bias is None else weights.gate_up_bias[e])
            gate, up = inner[0::2], inner[1::2]
            if activation.limit is None:
                h = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
                h = gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
            y = down[e] @ h + (0 if weights.down_bias is None else weights.down_bias[e])
            out[t] += routing.weights[t, k] * y
    return out


def routing_of(num_tokens: int, seed: int = 5) -> Routing:
    scores = draw(num_tokens, E, seed=seed)
    return Routing(scores.argsort(dim=-1)[:, :TOP_K].int(), draw(num_tokens, TOP_K, seed=seed + 1).softmax(-1))


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@ONLY
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize(("has_bias", "activation"), [(True, CLAMPED), (False, PLAIN)])
@pytest.mark.parametrize("format", ["dense", "mxfp4", "fp8_block"])
def test_experts(only: str, format: ExpertFormat, has_bias: bool, activation: Activation, num_tokens: int) -> None:
    weights, gate_up, down = experts_of(format, has_bias)
    experts = ops_of(only).experts.pack(weights, need_of(format, has_bias, activation))
    x, routing = draw(num_tokens, H, seed=9), routing_of(num_tokens)
    truth = naive_experts(x, routing, gate_up, down, weights, activation)
    assert error(experts(x, routing), truth) < 1e-5
    stream = draw(num_tokens, H, seed=10)
    before = stream.clone()
    assert experts(x, routing, stream) is stream
    assert error(stream - before, truth) < 1e-5


@ONLY
def test_no_tokens(only: str) -> None:
    weights, _, _ = experts_of("dense", True)
    experts = ops_of(only).experts.pack(weights, need_of("dense", True, CLAMPED))
    assert experts(torch.empty(0, H), routing_of(0)).shape == (0, H)


@ONLY
def test_a_row_does_not_depend_on_the_other_rows(only: str) -> None:
    """But for rounding of sums that a matmul of more rows orders otherwise."""
    weights, _, _ = experts_of("mxfp4", True)
    experts = ops_of(only).experts.pack(weights, need_of("mxfp4", True, CLAMPED))
    x, routing = draw(20, H, seed=9), routing_of(20)
    together = experts(x, routing)
    for t in (0, 7, 19):
        alone = experts(x[t : t + 1], Routing(routing.expert_ids[t : t + 1], routing.weights[t : t + 1]))
        assert error(alone[0], together[t]) < 1e-6


def test_bfloat16_sums_experts_in_float32() -> None:
    weights, gate_up, down = experts_of("mxfp4", False)
    experts = ops_of("torch_cpu", torch.bfloat16).experts.pack(weights, need_of("mxfp4", False, PLAIN, torch.bfloat16))
    x, routing = draw(33, H, seed=9).bfloat16(), routing_of(33)
    out = experts(x, routing)
    assert out.dtype == torch.bfloat16
    assert 1e-4 < error(out.float(), naive_experts(x.float(), routing, gate_up, down, weights, PLAIN)) < 1e-2


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "rule",
    [RouterRule(3, "topk_softmax", False), RouterRule(3, "softmax_topk", True), RouterRule(3, "softmax_topk", False)],
)
def test_route(rule: RouterRule, has_bias: bool, norm: bool) -> None:
    x, weight = draw(17, H, seed=1), draw(E, H, seed=2)
    bias = draw(E, seed=3) if has_bias else None
    scale = 1 + 0.1 * draw(H, seed=4)
    route = ops_of("reference").route
    normed, routing = route(x, weight, bias, rule, norm=scale if norm else None, eps=1e-5)
    expected = functional.rms_norm(x, (H,), scale, 1e-5) if norm else x
    assert error(normed, expected) < 1e-6
    scores = expected @ weight.T + (bias if has_bias else 0)
    assert routing.expert_ids.dtype == torch.int32 and routing.weights.dtype == torch.float32
    for t in range(17):
        best = sorted(range(E), key=lambda e: -float(scores[t, e]))[:3]
        assert routing.expert_ids[t].tolist() == best
        if rule.scoring == "topk_softmax":
            weights = scores[t, best].softmax(-1)
        else:
            weights = scores[t].softmax(-1)[best]
            weights = weights / weights.sum() if rule.renormalize else weights
        assert torch.allclose(routing.weights[t], weights, atol=1e-6)


def test_ties_go_to_the_lower_number() -> None:
    route = ops_of("reference").route
    _, routing = route(torch.ones(2, H), torch.zeros(64, H), None, RouterRule(5, "softmax_topk", True))
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_values(dtype: torch.dtype) -> None:
    """Every byte, with scales around 1 and at both ends of what bfloat16 can hold."""
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    for exponent in (2, 118, 127, 130, 250):
        scale = torch.full((1, 16), exponent, dtype=torch.uint8)
        assert torch.equal(mxfp4.dequantize(packed, scale, dtype), naive_mxfp4(packed, scale).to(dtype))
    assert mxfp4.dequantize(packed, torch.full((1, 16), 255, dtype=torch.uint8), dtype).isnan().all()


def test_mxfp4_quantize_is_the_nearest_value() -> None:
    dense = draw(8, 64, seed=3)
    packed, scale = mxfp4.quantize(dense)
    back = mxfp4.dequantize(packed, scale, torch.float32)
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(back), torch.float32), back)
    step = 2.0 ** (scale.float() - 127).repeat_interleave(32, -1)
    # The steps between values are 0.5 up to 2, 1 up to 4, then 2; what is beyond 6 is cut off, by 2 at most.
    assert ((dense - back).abs() <= step * 2).all()
    small = (dense.abs() < 2 * step) & (back.abs() < 2 * step)
    assert small.any() and ((dense - back).abs()[small] <= 0.25 * step[small]).all()
