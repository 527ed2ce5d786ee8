"""The product of `moe_mxfp4_mma` in Gluon, Triton's language of layouts: what it is for and its numerics stand there.

A program multiplies BLOCK_N weight rows by BLOCK_M pairs, CHUNKS times 128 columns a step. Bytes of weights go from
memory to shared memory by asynchronous copies, from there straight into the registers from which the tensor core takes
its left matrix (the layout of `moe_mxfp4`, 16 bytes a thread by one load), and two instructions a byte pair make e4m3
of them. Nothing changes its thread. Rows 2 i and 2 i + 1 of sixteen are rows i and i + 8 of the tensor core's tile, so
that gate and up meet in one thread.

Importing this fails where the installed Triton has no such Gluon. Names that changed from Triton 3.6 to 3.9 are found
below under either.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.moe_mxfp4 import low_bits

copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_low_bits = gluon.jit(low_bits.fn)
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def _two(codes):
    """Bytes of `moe_mxfp4` -> their first and their second code as e4m3, times 2^-6."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        and.b32 $0, $2, 0x9C9C9C9C;
        shl.b32 t, $2, 2;
        and.b32 t, t, 0x8C8C8C8C;
        shr.u32 u, $2, 2;
        lop3.b32 $1, u, 0x10101010, t, 0xEA;
        }
        """,
        "=r,=r,r",
        [codes],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@gluon.constexpr_function
def code_layout(rows):
    """Shared memory of `rows` by 32 bytes in the order of `moe_mxfp4`, rows as the tensor core numbers them."""
    bases = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    row = 16
    while row < rows:
        bases.append([row, 0])
        row *= 2
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def row_layout(rows):
    """Shared memory of one value a row, rows as the tensor core numbers them."""
    bases = [[8], [1], [2], [4]]
    row = 16
    while row < rows:
        bases.append([row])
        row *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _factor(word, BYTE: gl.constexpr):
    """A byte of a word of scales as the exponent of a float32."""
    if BYTE == 3:
        bits = (word >> 1) & 0x7F800000
    else:
        bits = (word << (23 - 8 * BYTE)) & 0x7F800000
    return bits.to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def _fill_weights(
    w_s, s_s, slot, w_at, s_at, step, w_left, s_chunk, N: gl.constexpr, K: gl.constexpr, CHUNKS: gl.constexpr
):  # fmt: skip
    """Start the copies of a step's weights. Nothing is read past the end, and what lies there becomes zeros."""
    copy_ahead(w_s.index(slot), w_at + step * (CHUNKS * 1024), mask=w_left > step * (2 * CHUNKS))
    copy_ahead(s_s.index(slot), s_at + gl.minimum(step * CHUNKS + s_chunk, (K + 127) // 128 - 1) * N)


@gluon.jit
def _fill_rows(high_s, low_s, slot, high_at, low_at, step, x_left, x_live, CHUNKS: gl.constexpr):
    """The same of its columns of x; then the step's copies are complete."""
    x_mask = x_live & (x_left > step * (8 * CHUNKS))
    copy_ahead(high_s.index(slot), high_at + step * (CHUNKS * 128), mask=x_mask)
    copy_ahead(low_s.index(slot), low_at + step * (CHUNKS * 128), mask=x_mask)
    async_copy.commit_group()


@gluon.jit
def _pair(a, high, low, start: gl.constexpr, zero):
    """32 columns times both parts of x, into a sum of their own."""
    d = warpgroup_mma(a, low.slice(start, 32, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(a, high.slice(start, 32, 1).permute((1, 0)), d, is_async=True)


@gluon.jit
def _use(
    acc, w_s, s_s, high_s, low_s, slot,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, AT_ONCE: gl.constexpr, mma: gl.constexpr,
    x_shared: gl.constexpr,
):  # fmt: skip
    """acc + a step's product. AT_ONCE: blocks of 32 columns whose products run before the first is waited for."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    row_l: gl.constexpr = gl.SliceLayout(1, mma)
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, mma)
    w = view(w_s.index(slot), gl.int8, [2 * CHUNKS, BLOCK_N // 16, 512], flat2)
    s = view(s_s.index(slot), gl.int32, [CHUNKS, BLOCK_N], flat1)
    high_all = view(high_s.index(slot), gl.float8e4nv, [CHUNKS, BLOCK_M, 128], x_shared)
    low_all = view(low_s.index(slot), gl.float8e5, [CHUNKS, BLOCK_M, 128], x_shared)
    for c in gl.static_range(CHUNKS):
        codes0 = view(w.index(c * 2), gl.int8, [BLOCK_N, 32], code_layout(BLOCK_N)).load(a_layout)
        codes1 = view(w.index(c * 2 + 1), gl.int8, [BLOCK_N, 32], code_layout(BLOCK_N)).load(a_layout)
        word = view(s.index(c), gl.int32, [BLOCK_N], row_layout(BLOCK_N)).load(row_l)
        high = high_all.index(c)
        low = low_all.index(c)
        a0, a1 = _two(codes0)
        a2, a3 = _two(codes1)
        if AT_ONCE == 4:
            d0 = _pair(a0, high, low, 0, zero)
            d1 = _pair(a1, high, low, 32, zero)
            d2 = _pair(a2, high, low, 64, zero)
            d3 = _pair(a3, high, low, 96, zero)
            d0, d1, d2, d3 = warpgroup_mma_wait(0, [d0, d1, d2, d3])
            acc = gl.fma(d0, _factor(word, 0), acc)
            acc = gl.fma(d1, _factor(word, 1), acc)
            acc = gl.fma(d2, _factor(word, 2), acc)
            acc = gl.fma(d3, _factor(word, 3), acc)
        elif AT_ONCE == 2:
            d0 = _pair(a0, high, low, 0, zero)
            d1 = _pair(a1, high, low, 32, zero)
            d0, d1 = warpgroup_mma_wait(0, [d0, d1])
            acc = gl.fma(d0, _factor(word, 0), acc)
            acc = gl.fma(d1, _factor(word, 1), acc)
            d2 = _pair(a2, high, low, 64, zero)
            d3 = _pair(a3, high, low, 96, zero)
            d2, d3 = warpgroup_mma_wait(0, [d2, d3])
            acc = gl.fma(d2, _factor(word, 2), acc)
            acc = gl.fma(d3, _factor(word, 3), acc)
        else:
            d0 = warpgroup_mma_wait(0, [_pair(a0, high, low, 0, zero)])
            acc = gl.fma(d0, _factor(word, 0), acc)
            d1 = warpgroup_mma_wait(0, [_pair(a1, high, low, 32, zero)])
            acc = gl.fma(d1, _factor(word, 1), acc)
            d2 = warpgroup_mma_wait(0, [_pair(a2, high, low, 64, zero)])
            acc = gl.fma(d2, _factor(word, 2), acc)
            d3 = warpgroup_mma_wait(0, [_pair(a3, high, low, 96, zero)])
            acc = gl.fma(d3, _factor(word, 3), acc)
    return acc


@gluon.jit
def _store_hidden(
    acc, y_ptr, y_low_ptr, first_row, first, end,
    N: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, H_SCALE: gl.constexpr,
):  # fmt: skip
    """The activation (see `moe.interface.Activation`; LIMIT 0 = none) of gate and up; a NaN stays one."""
    gate, up = gl.split(gl.permute(gl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1)))
    if LIMIT > 0:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    h = gl.reshape(gate / (1.0 + gl.exp(-ALPHA * gate)) * up, (BLOCK_N // 2, BLOCK_M))
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
    h = gl.convert_layout(h, layout)
    cols = first_row // 2 + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, layout))
    places = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    where = places.to(gl.int64)[None, :] * (N // 2) + cols[:, None]
    mask = (places < end)[None, :] & (cols < N // 2)[:, None]
    if H_SCALE > 0:
        h = h * H_SCALE
        high = h.to(gl.float8e4nv)
        gl.store(y_ptr + where, high, mask=mask)
        low = _low_bits(h - high.to(gl.float32)).to(gl.float8e5, bitcast=True)
        gl.store(y_low_ptr + where, low, mask=mask)
    else:
        gl.store(y_ptr + where, h.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["max_tiles", "num_pairs"])
def product_kernel(
    high_ptr, low_ptr, inverse_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, tiles_ptr, route_ptr, y_ptr, y_low_ptr,
    max_tiles, num_pairs,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNKS: gl.constexpr, SPLIT_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, IS_UP: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, H_SCALE: gl.constexpr, HAS_BIAS: gl.constexpr, UNROLL: gl.constexpr,
    AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """IS_UP: x by pair // TOP_K, N = 2 I interleaved rows, y = h [P, I] by place, as two parts of h * H_SCALE (H_SCALE
    0: y alone, as it is). Otherwise x by place, y = parts [SPLIT_K, P, N] by pair, times the pair's weight; `inverse`
    by row of x, or 1 / H_SCALE. SharedLinearLayout and the copies want BLOCK_N of 64 at least, a multiple of 16 WARPS.
    """
    NUM_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SIXTEENS: gl.constexpr = BLOCK_N // 16
    GROUPS: gl.constexpr = (K + 63) // 64
    ALL_CHUNKS: gl.constexpr = (K + 127) // 128
    STEPS: gl.constexpr = ((ALL_CHUNKS + CHUNKS - 1) // CHUNKS + SPLIT_K - 1) // SPLIT_K
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    row_l: gl.constexpr = gl.SliceLayout(1, mma)
    col_l: gl.constexpr = gl.SliceLayout(0, mma)
    w_copy: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [WARPS, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    s_copy: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    x_shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    group = program // (GROUP_M * NUM_N)
    group_tiles = gl.minimum(max_tiles - group * GROUP_M, GROUP_M)
    inner = program % (GROUP_M * NUM_N)
    tile = group * GROUP_M + inner % group_tiles
    first_row = inner // group_tiles * BLOCK_N
    split = gl.program_id(1)
    if IS_UP:
        gdc_wait()
    # The launch of down has the tiles before its turn: gate and up waited for them. From L2: an SM may still have older
    # ones in its own cache.
    expert = gl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        return
    first = gl.load(tiles_ptr + max_tiles + tile, cache_modifier=".cg")
    end = gl.load(tiles_ptr + 2 * max_tiles + tile, cache_modifier=".cg")
    start = split * STEPS

    w_rows = gl.arange(0, 2 * CHUNKS * SIXTEENS, gl.SliceLayout(1, w_copy))
    w_byte = gl.arange(0, 512, gl.SliceLayout(0, w_copy))
    # Rows past the last one: the last sixteen once more, and the last four scales.
    sixteen = gl.minimum(first_row // 16 + w_rows % SIXTEENS, N // 16 - 1)
    w_at = w_ptr + expert.to(gl.int64) * (N // 16 * GROUPS * 512)
    w_at = w_at + (w_rows // SIXTEENS * 512 + sixteen * (GROUPS * 512))[:, None] + w_byte[None, :]
    w_left = gl.minimum(GROUPS, (start + STEPS) * (2 * CHUNKS)) - (w_rows // SIXTEENS)[:, None] + (w_byte * 0)[None, :]
    s_rows = gl.arange(0, CHUNKS * BLOCK_N, s_copy)
    if N % BLOCK_N != 0:
        s_row = gl.minimum(first_row + s_rows % BLOCK_N // 4 * 4, N - 4) + s_rows % 4
    else:
        s_row = first_row + s_rows % BLOCK_N
    s_chunk = s_rows // BLOCK_N
    s_at = scale_ptr + expert.to(gl.int64) * (ALL_CHUNKS * N) + s_row
    w_s = gl.allocate_shared_memory(gl.int8, [STAGES, 2 * CHUNKS * SIXTEENS, 512], flat2)
    s_s = gl.allocate_shared_memory(gl.int32, [STAGES, CHUNKS * BLOCK_N], flat1)
    for i in gl.static_range(STAGES - 1):
        _fill_weights(w_s, s_s, i, w_at, s_at, start + i, w_left, s_chunk, N, K, CHUNKS)
    if not IS_UP:
        # The first weights are on their way before h is there.
        gdc_wait()
    gdc_launch_dependents()

    x_rows = gl.arange(0, CHUNKS * BLOCK_M, gl.SliceLayout(1, x_copy))
    x_place = first + x_rows % BLOCK_M
    x_is_live = x_place < end
    if IS_UP:
        x_row = gl.load(pairs_ptr + x_place, mask=x_is_live, other=0, cache_modifier=".cg") // TOP_K
    else:
        x_row = x_place
    x_cols = gl.arange(0, 128, gl.SliceLayout(0, x_copy))
    x_col = (x_rows // BLOCK_M * 128)[:, None] + x_cols[None, :]
    x_offset = (x_row.to(gl.int64) * K)[:, None] + x_col
    # In sixteen columns; the mask of a step is what is left after those before.
    x_left = gl.minimum(K // 16, (start + STEPS) * (8 * CHUNKS)) - x_col // 16
    x_live = x_is_live[:, None] & (x_cols >= 0)[None, :]
    high_at = high_ptr + x_offset
    low_at = low_ptr + x_offset
    high_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, CHUNKS * BLOCK_M, 128], x_shared)
    low_s = gl.allocate_shared_memory(gl.float8e5, [STAGES, CHUNKS * BLOCK_M, 128], x_shared)
    for i in gl.static_range(STAGES - 1):
        _fill_rows(high_s, low_s, i, high_at, low_at, start + i, x_left, x_live, CHUNKS)
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, mma)
    if UNROLL:
        for outer in range(0, STEPS // STAGES):
            for i in gl.static_range(STAGES):
                async_copy.wait_group(STAGES - 2)
                barrier()
                step = start + outer * STAGES + i + STAGES - 1
                _fill_weights(
                    w_s, s_s, (i + STAGES - 1) % STAGES, w_at, s_at, step, w_left, s_chunk, N, K, CHUNKS
                )  # fmt: skip
                _fill_rows(high_s, low_s, (i + STAGES - 1) % STAGES, high_at, low_at, step, x_left, x_live, CHUNKS)
                acc = _use(acc, w_s, s_s, high_s, low_s, i, BLOCK_N, BLOCK_M, CHUNKS, AT_ONCE, mma, x_shared)
        for i in gl.static_range(STEPS % STAGES):
            async_copy.wait_group(STAGES - 2)
            barrier()
            async_copy.commit_group()
            acc = _use(acc, w_s, s_s, high_s, low_s, i, BLOCK_N, BLOCK_M, CHUNKS, AT_ONCE, mma, x_shared)
    else:
        stage = 0
        fill = STAGES - 1
        for step in range(STEPS):
            async_copy.wait_group(STAGES - 2)
            barrier()
            ahead = start + step + STAGES - 1
            _fill_weights(w_s, s_s, fill, w_at, s_at, ahead, w_left, s_chunk, N, K, CHUNKS)
            _fill_rows(high_s, low_s, fill, high_at, low_at, ahead, x_left, x_live, CHUNKS)
            acc = _use(acc, w_s, s_s, high_s, low_s, stage, BLOCK_N, BLOCK_M, CHUNKS, AT_ONCE, mma, x_shared)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            fill = gl.where(fill == STAGES - 1, 0, fill + 1)
    async_copy.wait_group(0)

    tile_rows = gl.arange(0, BLOCK_N, row_l)
    rows = first_row + tile_rows // 16 * 16 + tile_rows % 8 * 2 + tile_rows % 16 // 8
    places = first + gl.arange(0, BLOCK_M, col_l)
    live = places < end
    pairs = gl.load(pairs_ptr + places, mask=live, other=0, cache_modifier=".cg")
    if IS_UP:
        acc = acc * gl.load(inverse_ptr + pairs // TOP_K, mask=live, other=0.0)[None, :]
    elif H_SCALE > 0:
        acc = acc * (1.0 / H_SCALE)
    else:
        acc = acc * gl.load(inverse_ptr + places, mask=live, other=0.0)[None, :]
    if HAS_BIAS:
        bias = gl.load(bias_ptr + expert * N + rows, mask=rows < gl.where(split == 0, N, 0), other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if IS_UP:
        _store_hidden(
            acc, y_ptr, y_low_ptr, first_row, first, end, N, BLOCK_N, BLOCK_M, WARPS, LIMIT, ALPHA, H_SCALE
        )  # fmt: skip
    else:
        acc *= gl.load(route_ptr + pairs, mask=live, other=0.0)[None, :]
        where = (split.to(gl.int64) * num_pairs + pairs)[None, :] * N + rows[:, None]
        gl.store(y_ptr + where, acc.to(y_ptr.dtype.element_ty), mask=live[None, :] & (rows < N)[:, None])
