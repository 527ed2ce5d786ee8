"""What the adapters to other people's attention kernels share: how a package is looked for, and common limits."""

from __future__ import annotations

import importlib.util

import torch

from tokenspeed.attention.interface import NEEDS_GPU, AttentionBatch, AttentionNeed

NOT_VERIFIED = "this adapter follows its package's documentation and has not been run with it"


def package_obstacle(module: str, package: str) -> str | None:
    """None when `module` can be imported, otherwise what to install. Imports nothing but the module's parents."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    return None if found else f"the package {package} is not installed"


def common_obstacle(need: AttentionNeed, head_dims: range, takes_sinks: bool = False) -> str | None:
    """What keeps any adapter from serving a need.

    Args:
        head_dims: sizes that the kernels take.
        takes_sinks: the adapter passes sinks on, or applies them itself.
    """
    if need.device != "cuda":
        return NEEDS_GPU
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes 16-bit activations, the dtype is {need.dtype}"
    if need.kv_dtype not in (None, need.dtype):
        return f"the adapter gives it a KV cache of the activations' dtype, not {need.kv_dtype}"
    if need.has_sinks and not takes_sinks:
        return "the adapter passes no attention sinks"
    if need.logit_cap is not None:
        return f"the adapter passes no logit cap (asked: {need.logit_cap})"
    if need.num_heads % need.num_kv_heads:
        return f"{need.num_heads} query heads do not share {need.num_kv_heads} key/value heads evenly"
    if need.head_dim not in head_dims:
        return f"a head_dim of {need.head_dim} is not among {head_dims.start}, {head_dims.start + head_dims.step}, " + (
            f"... {head_dims[-1]}"
        )
    return None


def capability_obstacle(need: AttentionNeed, majors: tuple[int, ...]) -> str | None:
    """None when the GPU's generation is one of `majors`, otherwise the reason."""
    if need.capability is not None and need.capability[0] in majors:
        return None
    wanted = " or ".join(f"{major}.x" for major in majors)
    have = "unknown" if need.capability is None else ".".join(map(str, need.capability))
    return f"it needs compute capability {wanted}, the GPU's is {have}"


def longest_query(batch: AttentionBatch) -> int:
    """Query tokens of the request that has most; in a recorded step, of which the host knows no lengths, as many as it
    can have."""
    if batch.query_lens_host is not None:
        return max(batch.query_lens_host)
    return 1 if batch.num_tokens == batch.num_requests else batch.num_tokens
