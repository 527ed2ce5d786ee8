"""The product of `moe_mxfp4_fp16` in Gluon: what it is for and its numerics stand there.

Weights go the way of `moe_mxfp4_gluon`, up to the registers from which the tensor core takes its left matrix. There a
byte pair becomes two float16 pairs, by two conversions from e4m3 and two multiplications by the block's factor, which
is a power of two: exact. The sum over all columns stays in the tensor core's registers; nothing is scaled in between.

A thread has four neighbouring columns of a row, the tensor core wants two and two eight columns apart. So columns are
renamed, within sixteen, and rows of x and h have theirs in that order ("Columns" there).

`AHEAD`: the next step's weights are unpacked while this one's product runs. ptxas 12.8 lets no register that a running
product reads be written, and behind a wait for some of them (`wait_group` 1 or 2) it serializes everything (C7513); so
there is one wait, for all, between the unpacking and the next product, and a loop that never runs keeps ptxas from
moving the unpacking behind it.

Importing this fails where the installed Triton has no such Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.moe_mxfp4_gluon import barrier, code_layout, copy_ahead, row_layout, view


@gluon.constexpr_function
def _take(block):
    return f"prmt.b32 $0, $1, 0, {(block << 12) | 0x404 | (block << 4)};"


@gluon.jit
def _factor(word, BLOCK: gl.constexpr):
    """Byte BLOCK of a word, an exponent of float16 times 4, as two float16."""
    return gl.inline_asm_elementwise(_take(BLOCK), "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _two(codes, f0, f1):
    """Bytes of `moe_mxfp4`, factors -> first and second code as float16 times their factor and 2^-6."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, t, u, x0, x1, y0, y1;
        .reg .b16 l, h;
        and.b32 a, $4, 0x9C9C9C9C;
        shl.b32 t, $4, 2;
        and.b32 t, t, 0x8C8C8C8C;
        shr.u32 u, $4, 2;
        lop3.b32 b, u, 0x10101010, t, 0xEA;
        mov.b32 {l, h}, a;
        cvt.rn.f16x2.e4m3x2 x0, l;
        cvt.rn.f16x2.e4m3x2 x1, h;
        mov.b32 {l, h}, b;
        cvt.rn.f16x2.e4m3x2 y0, l;
        cvt.rn.f16x2.e4m3x2 y1, h;
        mul.rn.f16x2 $0, x0, $5;
        mul.rn.f16x2 $1, x1, $5;
        mul.rn.f16x2 $2, y0, $9;
        mul.rn.f16x2 $3, y1, $9;
        }
        """,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
        [codes, f0, f1],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _stay(value):
    """Nothing, but ptxas moves no instruction over it: a loop that ends at once."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        mov.b32 $0, $1;
        again:
        setp.ne.s32 p, $1, 99;
        @p bra done;
        nanosleep.u32 100;
        bra again;
        done:
        }
        """,
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _operand(part, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """[N, 32], four neighbours a thread -> two and two, in the same registers: columns are renamed."""
    parts = gl.permute(gl.reshape(part, (BLOCK_N, 2, 4, 2, 2)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(parts, (BLOCK_N, 32)), layout, assert_trivial=True)


@gluon.jit
def _unpack(
    w_s, s_s, slot, reference, ODD: gl.constexpr, BLOCK_N: gl.constexpr, a_code: gl.constexpr, a_half: gl.constexpr
):  # fmt: skip
    """A step's 64 columns as two operands. ODD: their scales are the upper two of a word."""
    a_row: gl.constexpr = gl.SliceLayout(1, a_code)
    codes = view(w_s.index(slot), gl.int8, [BLOCK_N, 32], code_layout(BLOCK_N)).load(a_code)
    word = view(s_s.index(slot), gl.int32, [BLOCK_N], row_layout(BLOCK_N)).load(a_row)
    word = (word - reference) << 2
    if ODD:
        f0 = _factor(word, 2)[:, None]
        f1 = _factor(word, 3)[:, None]
    else:
        f0 = _factor(word, 0)[:, None]
        f1 = _factor(word, 1)[:, None]
    first, second = _two(codes, f0, f1)
    return _operand(first, BLOCK_N, a_half), _operand(second, BLOCK_N, a_half)


@gluon.jit
def _fill(
    w_s, s_s, x_s, slot, w_at, s_at, x_at, step, w_left, x_left, x_live, N: gl.constexpr, NUM_WORDS: gl.constexpr
):  # fmt: skip
    """Start a step's copies. Nothing is read past the end, and what lies there becomes zeros."""
    copy_ahead(w_s.index(slot), w_at + step * 512, mask=w_left > step)
    copy_ahead(s_s.index(slot), s_at + gl.minimum(step // 2, NUM_WORDS - 1) * N)
    copy_ahead(x_s.index(slot), x_at + step * 64, mask=x_live & (x_left > step * 8))
    async_copy.commit_group()


@gluon.jit
def _mma(acc, a0, a1, x_s, slot):
    x = x_s.index(slot)
    acc = warpgroup_mma(a0, x.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(a1, x.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _step(
    acc, a0, a1, w_s, s_s, x_s, slot, w_at, s_at, x_at, step, w_left, x_left, x_live, reference,
    N: gl.constexpr, NUM_WORDS: gl.constexpr, STAGES: gl.constexpr, ODD: gl.constexpr, BLOCK_N: gl.constexpr,
    a_code: gl.constexpr, a_half: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """acc + the product of `step`. AHEAD: its weights are in a0 and a1, and the next ones are made while it runs."""
    after = gl.where(slot == STAGES - 1, 0, slot + 1)
    before = gl.where(slot == 0, STAGES - 1, slot - 1)
    ahead = step + STAGES - 1
    if AHEAD:
        acc = _mma(acc, a0, a1, x_s, slot)
        async_copy.wait_group(STAGES - 3)
        barrier()
        _fill(w_s, s_s, x_s, before, w_at, s_at, x_at, ahead, w_left, x_left, x_live, N, NUM_WORDS)
        a0, a1 = _unpack(w_s, s_s, after, reference, not ODD, BLOCK_N, a_code, a_half)
        after = _stay(after)
        acc, a0, a1 = warpgroup_mma_wait(0, [acc, a0, a1])
    else:
        async_copy.wait_group(STAGES - 2)
        barrier()
        _fill(w_s, s_s, x_s, before, w_at, s_at, x_at, ahead, w_left, x_left, x_live, N, NUM_WORDS)
        a0, a1 = _unpack(w_s, s_s, slot, reference, ODD, BLOCK_N, a_code, a_half)
        acc = warpgroup_mma_wait(0, [_mma(acc, a0, a1, x_s, slot)])
    return acc, a0, a1, after


@gluon.jit
def _store(
    acc, inverse_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first, end, first_row,
    N: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, IS_UP: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, H_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, WARPS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    row_l: gl.constexpr = gl.SliceLayout(1, mma)
    col_l: gl.constexpr = gl.SliceLayout(0, mma)
    tile_rows = gl.arange(0, BLOCK_N, row_l)
    rows = first_row + tile_rows // 16 * 16 + tile_rows % 8 * 2 + tile_rows % 16 // 8
    places = first + gl.arange(0, M, col_l)
    live = places < end
    pairs = gl.load(pairs_ptr + places, mask=live, other=0, cache_modifier=".cg")
    reference = gl.load(reference_ptr + expert * N + gl.minimum(rows, N - 1))
    row_scale = ((reference + 15) << 23).to(gl.float32, bitcast=True)  # 2^(reference - 112), which is no subnormal
    if IS_UP:
        acc = acc * row_scale[:, None] * gl.load(inverse_ptr + pairs // TOP_K, mask=live, other=0.0)[None, :]
    else:
        acc = acc * row_scale[:, None] * (1.0 / H_SCALE)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + expert * N + rows, mask=rows < N, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    out_l: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    out_rows_l: gl.constexpr = gl.SliceLayout(1, out_l)
    out_places = first + gl.arange(0, M, gl.SliceLayout(0, out_l))
    if IS_UP:
        # The activation (see `moe.interface.Activation`; there is a limit); a NaN stays one.
        gate, up = gl.split(gl.permute(gl.reshape(acc, (BLOCK_N // 16, 2, 8, M)), (0, 2, 3, 1)))
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        h = (gate / (1.0 + gl.exp(-ALPHA * gate)) * up * H_SCALE).to(gl.float16)
        h = gl.permute(gl.reshape(h, (BLOCK_N // 32, 4, 2, 2, M)), (0, 2, 1, 3, 4))  # columns renamed, like x
        h = gl.convert_layout(gl.reshape(h, (BLOCK_N // 2, M)), out_l)
        cols = first_row // 2 + gl.arange(0, BLOCK_N // 2, out_rows_l)
        where = out_places.to(gl.int64)[None, :] * (N // 2) + cols[:, None]
        gl.store(y_ptr + where, h, mask=(out_places < end)[None, :] & (cols < N // 2)[:, None])
    else:
        acc *= gl.load(route_ptr + pairs, mask=live, other=0.0)[None, :]
        part = acc.to(y_ptr.dtype.element_ty)
        part = gl.permute(gl.reshape(part, (BLOCK_N // 16, 2, 8, M)), (0, 2, 1, 3))
        part = gl.convert_layout(gl.reshape(part, (BLOCK_N, M)), out_l)
        out_rows = first_row + gl.arange(0, BLOCK_N, out_rows_l)
        out_pairs = gl.load(pairs_ptr + out_places, mask=out_places < end, other=0, cache_modifier=".cg")
        where = out_pairs.to(gl.int64)[None, :] * N + out_rows[:, None]
        gl.store(y_ptr + where, part, mask=(out_places < end)[None, :] & (out_rows < N)[:, None])


@gluon.jit
def _sources(
    x_ptr, w_ptr, scale_ptr, pairs_ptr, expert, first, end, first_row,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr,
    IS_UP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where a thread's copies of the first step come from, weights, scales and x, and the masks of `_fill`."""
    SIXTEENS: gl.constexpr = BLOCK_N // 16
    STEPS: gl.constexpr = (K + 63) // 64
    NUM_WORDS: gl.constexpr = (K + 127) // 128
    w_copy: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    w_rows = gl.arange(0, SIXTEENS, gl.SliceLayout(1, w_copy))
    w_byte = gl.arange(0, 512, gl.SliceLayout(0, w_copy))
    # Rows past the last one: the last sixteen once more, and the last four scales.
    sixteen = gl.minimum(first_row // 16 + w_rows, N // 16 - 1)
    w_at = w_ptr + expert.to(gl.int64) * (N // 16 * STEPS * 512) + (sixteen * (STEPS * 512))[:, None] + w_byte[None, :]
    w_left = STEPS + (w_rows * 0)[:, None] + (w_byte * 0)[None, :]
    s_rows = gl.arange(0, BLOCK_N, s_copy)
    s_row = gl.minimum(first_row + s_rows // 4 * 4, N - 4) + s_rows % 4
    s_at = scale_ptr + expert.to(gl.int64) * (NUM_WORDS * N) + s_row
    x_rows = gl.arange(0, M, gl.SliceLayout(1, x_copy))
    x_place = first + x_rows
    x_is_live = x_place < end
    if IS_UP:
        x_row = gl.load(pairs_ptr + x_place, mask=x_is_live, other=0, cache_modifier=".cg") // TOP_K
    else:
        x_row = x_place
    x_cols = gl.arange(0, 64, gl.SliceLayout(0, x_copy))
    x_at = x_ptr + (x_row.to(gl.int64) * K)[:, None] + x_cols[None, :]
    # In eight columns; the mask of a step is what is left after those before.
    x_left = (K // 8 - x_cols // 8)[None, :] + (x_rows * 0)[:, None]
    x_live = x_is_live[:, None] & (x_cols >= 0)[None, :]
    return w_at, s_at, x_at, w_left, x_left, x_live


@gluon.jit
def _tile(
    x_ptr, inverse_ptr, w_ptr, scale_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first, end,
    first_row,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, IS_UP: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, H_SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """BLOCK_N weight rows times the pairs at places `first` to `end`, of which there are M at most."""
    SIXTEENS: gl.constexpr = BLOCK_N // 16
    STEPS: gl.constexpr = (K + 63) // 64
    NUM_WORDS: gl.constexpr = (K + 127) // 128
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    a_code: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    a_half: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    w_at, s_at, x_at, w_left, x_left, x_live = _sources(
        x_ptr, w_ptr, scale_ptr, pairs_ptr, expert, first, end, first_row, N, K, TOP_K, M, BLOCK_N, IS_UP, WARPS
    )
    w_s = gl.allocate_shared_memory(gl.int8, [STAGES, SIXTEENS, 512], flat2)
    s_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat1)
    x_s = gl.allocate_shared_memory(gl.float16, [STAGES, M, 64], gl.NVMMASharedLayout(128, 16, 2))
    for i in gl.static_range(STAGES - 1):
        _fill(w_s, s_s, x_s, i, w_at, s_at, x_at, i, w_left, x_left, x_live, N, NUM_WORDS)
    a_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, a_code))
    a_rows = gl.minimum(first_row + a_rows // 16 * 16 + a_rows % 8 * 2 + a_rows % 16 // 8, N - 1)
    reference = gl.load(reference_ptr + expert * N + a_rows) * 0x01010101
    acc = gl.zeros((BLOCK_N, M), gl.float32, mma)
    if AHEAD:
        async_copy.wait_group(STAGES - 2)
        barrier()
        a0, a1 = _unpack(w_s, s_s, 0, reference, False, BLOCK_N, a_code, a_half)
    else:
        a0 = gl.zeros((BLOCK_N, 32), gl.float16, a_half)
        a1 = a0
    slot = 0
    for outer in range(STEPS // 2):
        acc, a0, a1, slot = _step(
            acc, a0, a1, w_s, s_s, x_s, slot, w_at, s_at, x_at, outer * 2, w_left, x_left, x_live, reference,
            N, NUM_WORDS, STAGES, False, BLOCK_N, a_code, a_half, AHEAD,
        )  # fmt: skip
        acc, a0, a1, slot = _step(
            acc, a0, a1, w_s, s_s, x_s, slot, w_at, s_at, x_at, outer * 2 + 1, w_left, x_left, x_live, reference,
            N, NUM_WORDS, STAGES, True, BLOCK_N, a_code, a_half, AHEAD,
        )  # fmt: skip
    if STEPS % 2 == 1:
        if not AHEAD:
            async_copy.wait_group(STAGES - 2)
            barrier()
            a0, a1 = _unpack(w_s, s_s, slot, reference, False, BLOCK_N, a_code, a_half)
        acc = warpgroup_mma_wait(0, [_mma(acc, a0, a1, x_s, slot)])
    async_copy.wait_group(0)
    _store(
        acc, inverse_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first, end, first_row,
        N, TOP_K, M, BLOCK_N, IS_UP, LIMIT, ALPHA, H_SCALE, HAS_BIAS, WARPS, mma,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["max_tiles"])
def fp16_kernel(
    x_ptr, inverse_ptr, w_ptr, scale_ptr, reference_ptr, bias_ptr, pairs_ptr, tiles_ptr, route_ptr, y_ptr, max_tiles,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, SMALLEST: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, IS_UP: gl.constexpr, LIMIT: gl.constexpr,
    ALPHA: gl.constexpr, H_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """IS_UP: x by pair // TOP_K times `inverse` by row, N = 2 I interleaved rows, y = h [P, I] by place, times H_SCALE.
    Otherwise x = h by place, y = parts [P, N] by pair, times the pair's weight. The columns of x and h are renamed.

    A tile with few pairs is multiplied as one of a half or a quarter of BLOCK_M, where that is SMALLEST at least."""
    NUM_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = gl.program_id(0)
    group = program // (GROUP_M * NUM_N)
    group_tiles = gl.minimum(max_tiles - group * GROUP_M, GROUP_M)
    inner = program % (GROUP_M * NUM_N)
    tile = group * GROUP_M + inner % group_tiles
    first_row = inner // group_tiles * BLOCK_N
    gdc_wait()
    gdc_launch_dependents()
    expert = gl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        return
    first = gl.load(tiles_ptr + max_tiles + tile, cache_modifier=".cg")
    end = gl.load(tiles_ptr + 2 * max_tiles + tile, cache_modifier=".cg")
    if SMALLEST <= BLOCK_M // 4 and end - first <= BLOCK_M // 4:
        _tile(
            x_ptr, inverse_ptr, w_ptr, scale_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first,
            end, first_row, N, K, TOP_K, BLOCK_M // 4, BLOCK_N, STAGES, IS_UP, LIMIT, ALPHA, H_SCALE, HAS_BIAS, AHEAD,
            WARPS,
        )  # fmt: skip
    elif SMALLEST <= BLOCK_M // 2 and end - first <= BLOCK_M // 2:
        _tile(
            x_ptr, inverse_ptr, w_ptr, scale_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first,
            end, first_row, N, K, TOP_K, BLOCK_M // 2, BLOCK_N, STAGES, IS_UP, LIMIT, ALPHA, H_SCALE, HAS_BIAS, AHEAD,
            WARPS,
        )  # fmt: skip
    else:
        _tile(
            x_ptr, inverse_ptr, w_ptr, scale_ptr, reference_ptr, bias_ptr, pairs_ptr, route_ptr, y_ptr, expert, first,
            end, first_row, N, K, TOP_K, BLOCK_M, BLOCK_N, STAGES, IS_UP, LIMIT, ALPHA, H_SCALE, HAS_BIAS, AHEAD, WARPS,
        )  # fmt: skip
