"""The op `experts` by our Triton kernels: packs a layer's weights once, then chooses kernels by the number of tokens.

A few tokens of dense experts go through `moe_gemv`, all others through `moe_steps`: `moe_grouped`; MXFP4 on Hopper
`moe_mxfp4_mma`, prompts `moe_mxfp4_fp16` where that serves the layer. `moe_plans` says which and with what tiles.
Scratch comes from torch's allocator in each call, which a recorded graph keeps for itself.
"""

from __future__ import annotations

import logging

import torch

from tokenspeed.kernels.registry import Implementation, Need
from tokenspeed.kernels.triton.gpu import Workspace, has_pdl, shared_bytes, why_no_e4m3, why_no_triton
from tokenspeed.kernels.triton.moe_gemv import DenseExperts, gemv_down, gemv_gate_up, make_workspace
from tokenspeed.kernels.triton.moe_grouped import ExpertMatrix, expert_matrix
from tokenspeed.kernels.triton.moe_mxfp4 import BLOCK, pack_mxfp4
from tokenspeed.kernels.triton.moe_mxfp4_fp16 import why_no_fp16
from tokenspeed.kernels.triton.moe_mxfp4_mma import why_no_mma
from tokenspeed.kernels.triton.moe_plans import (
    NO_LIMIT,
    ExpertPlan,
    ExpertShape,
    ExpertTable,
    choose,
    heuristic_plans,
    load_table,
)
from tokenspeed.kernels.triton.moe_steps import run_steps, steps_of
from tokenspeed.moe.interface import ExpertWeights, MoeNeed, Routing

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)


class TritonExperts:
    """`moe.interface.Experts`. `plans` may be set to try others, and the matrices be used alone (benchmarks)."""

    max_fused_rows = NO_LIMIT

    def __init__(
        self,
        gate_up: ExpertMatrix,
        down: ExpertMatrix,
        gemv: DenseExperts | None,
        workspace: Workspace,
        need: MoeNeed,
        plans: tuple[ExpertPlan, ...],
        hopper: bool,
    ) -> None:
        self.gate_up, self.down = gate_up, down
        self._gemv, self._workspace = gemv, workspace
        self._num_experts, self._activation = need.num_experts, need.activation
        self.plans = plans
        self._hopper = hopper

    def __call__(self, x: torch.Tensor, routing: Routing, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `Experts.__call__`."""
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return x.new_empty(x.shape) if residual is None else residual
        plan = choose(self.plans, num_tokens)
        x = x.contiguous()
        if plan.gemv and self._gemv is not None:
            h = gemv_gate_up(x, routing.expert_ids, self._gemv, self._activation, pdl=self._hopper)
            out = torch.empty_like(x) if residual is None else residual
            return gemv_down(
                h, routing.expert_ids, routing.weights, self._gemv, out, self._workspace, residual is not None,
                pdl=self._hopper,
            )  # fmt: skip
        return run_steps(
            steps_of(plan.tiles[0], self._hopper), x, routing, self.gate_up, self.down, self._num_experts,
            self._activation, plan, residual,
        )  # fmt: skip


class TritonExpertKernels:
    """`kernels.ops.ExpertKernels`.

    Args:
        table: tuned plans of this GPU, or None.
        shared_bytes: shared memory that one program may have.
        gpu: its name, for the log.
        no_mma: why `moe_mxfp4_mma` does not run here, or None.
        no_e4m3: why weights in e4m3 are not read here, or None.
    """

    def __init__(
        self, device: torch.device, hopper: bool, table: ExpertTable | None, shared_bytes: int, gpu: str,
        no_mma: str | None, no_e4m3: str | None = None,
    ) -> None:  # fmt: skip
        self._hopper, self._table, self._shared_bytes, self._gpu = hopper, table, shared_bytes, gpu
        self._no_mma, self._no_e4m3 = no_mma, no_e4m3
        self._workspace = make_workspace(device)
        self._told: set[tuple[ExpertShape, str | None]] = set()

    def why_not(self, need: MoeNeed) -> str | None:
        """See `ExpertKernels.why_not`."""
        if need.format == "mxfp4":
            if need.dtype == torch.float16:
                return "MXFP4 experts are not computed in float16; use --dtype bfloat16"
            for what, size in (("hidden", need.hidden_size), ("intermediate", need.intermediate_size)):
                if size % BLOCK:
                    return f"the {what} size {size} is not a multiple of MXFP4's block of {BLOCK}"
        if need.hidden_size % 16 or need.intermediate_size % 16:
            sizes = f"{need.hidden_size} and {need.intermediate_size}"
            return f"the sizes {sizes} are not multiples of 16; use --device cpu"
        if need.format == "fp8_block" and need.dtype == torch.float16:
            return "e4m3 experts are not computed in float16; use --dtype bfloat16"
        if need.format == "fp8_block" and self._no_e4m3 is not None:
            return f"{self._no_e4m3}; use a checkpoint with experts in 16 bits"
        return None

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> TritonExperts:
        """See `MoeBackend.pack`. MXFP4 bytes are rearranged where they lie.

        Raises:
            CheckpointError: an MXFP4 scale that these kernels do not take (`moe_mxfp4`).
        """
        if weights.format == "mxfp4":
            assert weights.gate_up_scale is not None and weights.down_scale is not None
            up = pack_mxfp4(weights.gate_up.contiguous(), weights.gate_up_scale, "gate_up of an expert")
            low = pack_mxfp4(weights.down.contiguous(), weights.down_scale, "down of an expert")
            gate_up = expert_matrix("mxfp4", up, None, weights.gate_up_bias)
            down = expert_matrix("mxfp4", low, None, weights.down_bias)
            gemv = None
        else:
            up_weight, low_weight = weights.gate_up.contiguous(), weights.down.contiguous()
            gate_up = expert_matrix(weights.format, up_weight, weights.gate_up_scale, weights.gate_up_bias)
            down = expert_matrix(weights.format, low_weight, weights.down_scale, weights.down_bias)
            gemv = None
            if weights.format == "dense":
                gemv = DenseExperts(up_weight, low_weight, weights.gate_up_bias, weights.down_bias)
        plans = self._plans(need, gemv is not None, why_no_fp16(need.activation, gate_up, down))
        return TritonExperts(gate_up, down, gemv, self._workspace, need, plans, self._hopper)

    def _plans(self, need: MoeNeed, has_gemv: bool, no_fp16: str | None) -> tuple[ExpertPlan, ...]:
        shape = ExpertShape.of(need)
        no_mma = self.why_no_mma(need)
        no_fp16 = no_mma or no_fp16
        tuned = None if self._table is None or need.dtype not in HALF else self._table.find(shape)
        if tuned is not None and any((plan.mma and no_mma) or (plan.fp16 and no_fp16) for plan in tuned.plans):
            tuned = None
        key = shape, no_fp16
        is_new = key not in self._told
        self._told.add(key)
        if is_new and need.format == "mxfp4" and no_fp16 is not None:
            if no_mma is not None:
                logger.info("expert kernels: MXFP4 by plain arithmetic, not on FP8 tensor cores: %s", no_mma)
            else:
                logger.info("expert kernels: MXFP4 in prompts not on float16 tensor cores: %s", no_fp16)
        if tuned is not None:
            if is_new:
                logger.info("expert kernels: tiles measured on %s (%s)", self._gpu, tuned.measured)
            return tuned.plans
        if is_new:
            logger.info(
                "expert kernels: no tuned tiles for %s and %d %s experts of %d x %d, top %d; a heuristic chooses them "
                "(`tokenspeed bench kernels --tune` measures)",
                self._gpu, shape.num_experts, shape.format, shape.hidden_size, shape.intermediate_size, shape.top_k,
            )  # fmt: skip
        return heuristic_plans(
            shape, has_gemv, self._shared_bytes, need.dtype == torch.float32, no_mma is None, no_fp16 is None
        )

    def why_no_mma(self, need: MoeNeed) -> str | None:
        """None where `moe_mxfp4_mma` serves these experts here, otherwise the reason."""
        if need.format != "mxfp4" or need.dtype != torch.bfloat16:
            return f"they are for MXFP4 with bfloat16 activations, these are {need.format} in {need.dtype}"
        return self._no_mma


def _why_not(need: Need) -> str | None:
    reason = why_no_triton(need)
    if reason is not None:
        return reason
    if need.dtype not in (*HALF, torch.float32):
        return f"they take bfloat16, float16 and float32, the dtype is {need.dtype}"
    return None


def _make(need: Need) -> TritonExpertKernels:
    properties = torch.cuda.get_device_properties(need.device)
    return TritonExpertKernels(
        need.device, has_pdl(need.device), load_table(properties.name), shared_bytes(need.device), properties.name,
        why_no_mma(torch.cuda.get_device_capability(need.device), torch.version.hip is None),
        why_no_e4m3(need.device),
    )  # fmt: skip


IMPLEMENTATIONS = (Implementation(op="experts", name="triton", rank=50, why_not=_why_not, make=_make),)
