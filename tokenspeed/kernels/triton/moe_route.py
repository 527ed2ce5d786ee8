"""Router of a mixture-of-experts layer: optional RMSNorm, scores, top k and its weights; the op `route`.

Formula   s[t, e] = sum over h of x[t, h] W[e, h] + b[e] in float32; the k best, the lower expert first where two are
          equal; weight = exp(s) over its sum, either of the k or of all experts
Bytes     E * H * 2 (the router, once) + T * H * 2 in and, with a norm, out. Operations 2 T E H.
Bound     for few tokens latency: a router of 0.2 to 0.5 MB takes 0.1 us at 4.26 TB/s.

Few tokens: one launch, a program a token and a few experts. Each norms its token's x for itself, and the last of a
token to arrive picks. Many: scores by tensor cores, split along H where that fills the card, then a launch that adds
the parts up in order and picks. Neither depends on which program is first, and each row stands by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.triton.gpu import has_pdl, why_no_triton
from tokenspeed.kernels.triton.launch import ceil_div, power_of_2
from tokenspeed.kernels.triton.pointwise import rms_norm
from tokenspeed.kernels.triton.small_linear import MAX_ROWS
from tokenspeed.moe.interface import RouterRule, Routing

FUSED_ROWS = 16
"""Tokens up to which one launch does everything, the norm included; above, two, and one more for a norm."""
_FULL_CARD = 1024
"""Programs of the fused kernel that fit on an H200 at a time, roughly."""


@triton.jit
def _pick(
    scores, ids_ptr, weights_ptr, token,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, OF_ALL: tl.constexpr,
):  # fmt: skip
    """Top k of one token's scores [BLOCK_E] float32. OF_ALL: weights sum to one over all experts, else over the k.

    A score and its expert are one int64, so that a maximum finds both: the score's bits in an order that integers
    have, then the expert counted from the end. NaN ranks last, so that every id stays an expert; but the weights of a
    token with any are all NaN, as they are after a softmax, and what is wrong shows.
    """
    experts = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, triton.next_power_of_2(TOP_K))
    live = experts < E
    is_broken = tl.max((live & (scores != scores)).to(tl.int32), axis=0) > 0
    scores = tl.where(scores == scores, scores + 0.0, float("-inf"))  # + 0: -0 and 0 are equal
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - experts).to(tl.int64)
    keys = tl.where(live, keys, -(2**63))
    best = tl.max(tl.where(live, scores, float("-inf")), axis=0)
    ids = tl.zeros(slots.shape, dtype=tl.int32)
    weights = tl.zeros(slots.shape, dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        top = tl.max(keys, axis=0)
        expert = BLOCK_E - 1 - (top & 0xFFFFFFFF).to(tl.int32)
        found = (top >> 32).to(tl.int32)
        score = (found ^ ((found >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        ids = tl.where(slots == slot, expert, ids)
        weights = tl.where(slots == slot, tl.exp(score - best), weights)
        keys = tl.where(experts == expert, -(2**63), keys)
    if OF_ALL:
        total = tl.sum(tl.where(live, tl.exp(scores - best), 0.0), axis=0)
    else:
        total = tl.sum(weights, axis=0)
    total = tl.where(is_broken, float("nan"), total)
    tl.store(ids_ptr + token * TOP_K + slots, ids, mask=slots < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slots, weights / total, mask=slots < TOP_K)


@triton.jit
def _fused_kernel(
    x_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    scores_ptr,
    counter_ptr,
    ids_ptr,
    weights_ptr,
    eps,
    H: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    OWN_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OF_ALL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns OWN_E experts of one token; the last of the token picks. counter_ptr: int32 zeros, one a token,
    zero again afterwards."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    own = part * OWN_E + tl.arange(0, OWN_E)
    cols = tl.arange(0, BLOCK_H)
    inside = cols < H
    mask = (own < E)[:, None] & inside[None, :]
    w = tl.load(w_ptr + own[:, None] * H + cols[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        gain = tl.load(norm_ptr + cols, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * H + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
        normed = (x * scale * gain.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + token * H + cols, normed, mask=inside & (cols < tl.where(part == 0, H, 0)))
        x = normed.to(tl.float32)
    scores = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if HAS_BIAS:
        scores += tl.load(bias_ptr + own, mask=own < E, other=0.0).to(tl.float32)
    tl.store(scores_ptr + token * E + own, scores, mask=own < E)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + token, 1, sem="acq_rel")
    if arrived == tl.num_programs(1) - 1:
        tl.store(counter_ptr + token, 0)
        experts = tl.arange(0, BLOCK_E)
        everyone = tl.load(
            scores_ptr + token * E + experts, mask=experts < E, other=float("-inf"), cache_modifier=".cg"
        )
        _pick(everyone, ids_ptr, weights_ptr, token, E, TOP_K, BLOCK_E, OF_ALL)


# Any number of tokens runs the same code.
@triton.jit(do_not_specialize=["num_tokens"])
def _scores_kernel(
    x_ptr,
    w_ptr,
    parts_ptr,
    num_tokens,
    H: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x[BLOCK_T, part of H] @ W[BLOCK_E, part of H].T -> parts [SPLIT, T, E]."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    cols = tl.arange(0, BLOCK_H)
    span: tl.constexpr = ((H + BLOCK_H - 1) // BLOCK_H + SPLIT - 1) // SPLIT * BLOCK_H
    x_row = x_ptr + tokens.to(tl.int64)[:, None] * H
    w_col = w_ptr + experts[None, :] * H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for start in tl.range(split * span, min(split * span + span, H), BLOCK_H, num_stages=STAGES):
        inside = start + cols < H
        x = tl.load(x_row + start + cols[None, :], mask=(tokens < num_tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_col + start + cols[:, None], mask=(experts < E)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    where = parts_ptr + (split.to(tl.int64) * num_tokens + tokens)[:, None] * E + experts[None, :]
    tl.store(where, acc, mask=(tokens < num_tokens)[:, None] & (experts < E)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _pick_kernel(
    parts_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OF_ALL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    scores = tl.zeros((BLOCK_E,), dtype=tl.float32)
    if HAS_BIAS:
        scores += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for split in tl.static_range(SPLIT):
        scores += tl.load(parts_ptr + (split * num_tokens + token) * E + experts, mask=experts < E, other=0.0)
    _pick(scores, ids_ptr, weights_ptr, token, E, TOP_K, BLOCK_E, OF_ALL)


@dataclass(frozen=True, slots=True)
class FusedTile:
    """One launch: experts of a program, and warps."""

    experts: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SplitTile:
    """Two launches: tokens, experts and columns of a tile, programs that share one (along H), warps, stages."""

    tokens: int
    experts: int
    cols: int
    split: int
    num_warps: int = 4
    stages: int = 4


def make_counters(device: torch.device) -> torch.Tensor:
    """Counters of the fused kernel, one a token, shared by every call on one stream."""
    return torch.zeros(FUSED_ROWS, dtype=torch.int32, device=device)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RouterRule,
    counters: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    tile: FusedTile | SplitTile | None = None,
    pdl: bool = True,
) -> tuple[torch.Tensor, Routing]:
    """See `kernels.ops.Route`: x [T, H] contiguous, weight [E, H] in the same dtype, top_k <= E.

    Args:
        counters: int32 zeros, at least T of them where one launch does everything.
        tile: None = chosen by shape.
    """
    num_tokens, width = x.shape
    num_experts = weight.shape[0]
    routing = Routing(
        torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=x.device),
        torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=x.device),
    )
    if num_tokens == 0:
        return x, routing
    if tile is None:
        tile = choose_tile(num_tokens, num_experts, width)
    if isinstance(tile, FusedTile):
        return _route_at_once(x, weight, bias, rule, counters, norm, eps, tile, routing, pdl), routing
    if norm is not None:
        x = rms_norm(x, norm, eps, pdl=pdl)
    _route_in_two(x, weight, bias, rule, tile, routing, pdl)
    return x, routing


def _is_of_all(rule: RouterRule) -> bool:
    """Weights sum to one over all experts, not over the chosen."""
    return rule.scoring == "softmax_topk" and not rule.renormalize


def _route_at_once(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RouterRule,
    counters: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    tile: FusedTile,
    routing: Routing,
    pdl: bool,
) -> torch.Tensor:
    """One launch; fills `routing` and returns x, normed where there is a norm."""
    num_tokens, width = x.shape
    num_experts = weight.shape[0]
    y = x if norm is None else torch.empty_like(x)
    _fused_kernel[(num_tokens, ceil_div(num_experts, tile.experts))](
        x,
        norm,
        weight,
        bias,
        y,
        x.new_empty(num_tokens, num_experts, dtype=torch.float32),
        counters,
        routing.expert_ids,
        routing.weights,
        eps,
        H=width,
        E=num_experts,
        TOP_K=rule.top_k,
        OWN_E=tile.experts,
        BLOCK_H=power_of_2(width),
        BLOCK_E=power_of_2(num_experts),
        OF_ALL=_is_of_all(rule),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return y


def _route_in_two(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RouterRule,
    tile: SplitTile,
    routing: Routing,
    pdl: bool,
) -> None:
    """Two launches; fills `routing`."""
    num_tokens, width = x.shape
    num_experts = weight.shape[0]
    parts = x.new_empty(tile.split, num_tokens, num_experts, dtype=torch.float32)
    _scores_kernel[(ceil_div(num_tokens, tile.tokens), ceil_div(num_experts, tile.experts), tile.split)](
        x,
        weight,
        parts,
        num_tokens,
        H=width,
        E=num_experts,
        SPLIT=tile.split,
        BLOCK_T=tile.tokens,
        BLOCK_E=tile.experts,
        BLOCK_H=tile.cols,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    _pick_kernel[(num_tokens,)](
        parts,
        bias,
        routing.expert_ids,
        routing.weights,
        num_tokens,
        E=num_experts,
        TOP_K=rule.top_k,
        SPLIT=tile.split,
        BLOCK_E=power_of_2(num_experts),
        OF_ALL=_is_of_all(rule),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def choose_tile(num_tokens: int, num_experts: int, width: int) -> FusedTile | SplitTile:
    """Few tokens: as many programs as there are experts, while they fit on the card together. More: about 128 programs,
    by splitting along H. Near the best of a sweep on one H200: 2.8 to 5 us from 1 to 64 tokens."""
    if num_tokens <= FUSED_ROWS:
        per_program = power_of_2(ceil_div(num_tokens * num_experts, _FULL_CARD))
        return FusedTile(per_program, 4)
    tokens = 16 if num_tokens <= 64 else 64
    experts = min(64, max(16, power_of_2(num_experts)))
    tiles = ceil_div(num_tokens, tokens) * ceil_div(num_experts, experts)
    # A part is never shorter than 4 steps of 64 columns.
    split = max(1, min(16, 128 // tiles, width // 256))
    return SplitTile(tokens, experts, 64, 1 << (split.bit_length() - 1))


class TritonRoute:
    """`kernels.ops.Route`."""

    max_fused_rows = MAX_ROWS
    """As far as a layer's linears go, though above `FUSED_ROWS` the norm is a launch of its own here too: what the
    sublayer before adds to the stream needs none then."""

    def __init__(self, device: torch.device, pdl: bool) -> None:
        self._counters = make_counters(device)
        self._pdl = pdl

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rule: RouterRule,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[torch.Tensor, Routing]:
        return route(x, weight, bias, rule, self._counters, norm, eps, pdl=self._pdl)


def _make(need: Need) -> TritonRoute:
    return TritonRoute(need.device, has_pdl(need.device))


IMPLEMENTATIONS = (Implementation("route", "triton", 50, why_no_triton, _make),)
