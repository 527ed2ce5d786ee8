"""Prefetch into L2 for kernels that start before their input is ready (programmatic dependent launch)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_l2(addresses):
    """Bring the 128-byte lines at these addresses (int64) into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
