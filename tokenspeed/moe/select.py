"""Which backend runs a model's experts, and why not the others.

`auto` takes our own kernels. Names of the public contract that have no adapter are known by name, so that a user who
asks for one hears the reason instead of "unknown".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.config.backend_names import AUTO, grouped
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.moe_choices import NAMES
from tokenspeed.distributed.mesh import Mesh
from tokenspeed.kernels.ops import Ops
from tokenspeed.moe.interface import Activation, ExpertFormat, MoeBackend, MoeNeed
from tokenspeed.moe.own import TorchMoeBackend, TritonMoeBackend

BACKENDS: tuple[type[TritonMoeBackend] | type[TorchMoeBackend], ...] = (TritonMoeBackend, TorchMoeBackend)
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class SelectedMoe:
    """A backend and the need that it was chosen for: what an expert layer is built with."""

    backend: MoeBackend
    need: MoeNeed


def moe_need(config: ModelConfig, mesh: Mesh, format: ExpertFormat, ops: Ops) -> MoeNeed:
    """What one rank asks of a backend. `config` has expert layers; `format`: how the scheme keeps their matrices.

    Raises:
        ConfigError: the ranks cannot share the experts' columns evenly.
    """
    moe = config.moe
    assert moe is not None, "a model without expert layers needs no MoE backend"
    first, last = mesh.tp.split(moe.intermediate_size, "the intermediate size of an expert")
    return MoeNeed(
        device=ops.device.type,
        dtype=ops.dtype,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=last - first,
        format=format,
        has_bias=moe.expert_bias,
        activation=Activation(moe.limit, moe.alpha),
    )


def select_moe(need: MoeNeed, choice: str, ops: Ops) -> tuple[SelectedMoe, list[str]]:
    """The backend for a need, and the lines for the log.

    Args:
        choice: a backend's name, or `auto`.
    Raises:
        ConfigError: the choice is unknown or cannot serve the need (the message names what would), or nothing can.
    """
    reasons = {backend.name: backend.why_not(need) or _without_op(need, ops) for backend in BACKENDS}
    name = NAMES.select(choice, need.device, reasons)
    (chosen,) = (backend for backend in BACKENDS if backend.name == name)
    how = "" if choice == AUTO else " (asked for)"
    others = "" if choice != AUTO else f" (not {grouped(reasons)})"
    return SelectedMoe(chosen(ops), need), [f"MoE backend: {name}{how}, {_described(need)}{others}"]


def _without_op(need: MoeNeed, ops: Ops) -> str | None:
    if ops.experts is None or ops.route is None:
        return f"there are no expert kernels for {need.device} in {_name(need.dtype)}"
    return ops.experts.why_not(need)


def _described(need: MoeNeed) -> str:
    kept = {"dense": _name(need.dtype), "mxfp4": "MXFP4", "fp8_block": "e4m3 with a scale a block of 128 x 128"}
    return f"{need.num_experts} experts a layer, {need.top_k} a token, kept in {kept[need.format]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
