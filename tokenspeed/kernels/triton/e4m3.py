"""Weights in e4m3, widened in the registers from which a tensor core takes them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen_e4m3(w, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Weights in DTYPE; with PTX e4m3 to bfloat16, by way of float32, because the compiler's own way, float16 to
    bfloat16, runs at an eighth of the rate."""
    if PTX:
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            .reg .f32 fa, fb, fc, fd;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 fa, a;
            cvt.f32.f16 fb, b;
            cvt.f32.f16 fc, c;
            cvt.f32.f16 fd, d;
            cvt.rn.bf16x2.f32 $0, fb, fa;
            cvt.rn.bf16x2.f32 $1, fd, fc;
            }
            """,
            "=r,=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = w.to(DTYPE)
    return wide
