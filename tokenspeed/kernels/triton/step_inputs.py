"""The first kernel of a recorded step: from slots and lengths to what the model and attention read.

Formula   of row r at slot s, its token at position p: token_id = token_ids[s, p], page_table = page_tables[g, s],
          flat_slot = page_tables[g, s, p // page_size] * page_size + p % page_size, and so for each token of a prompt.
Bytes     8 a page number (read and written) and 8 a flat slot, in each group; 24 a token and up to 36 a request.
Bound     64 rows of 8192 tokens in pages of 64: 0.07 MB, 0.02 us at 4.26 TB/s on an H200. The launch is the cost, and
          what follows hides it by programmatic dependent launch.

Pages and flat slots come once for each cache group, by programs of their own: axis 1 of the launch. A group whose
layers see a window gets no page numbers from before the window of the step's first token.

Tokens of a recorded prompt step, half-open; `ends` comes from the host, query_start = [0, *ends]:
    [0, ends[0]) request 0   [ends[0], ends[1]) request 1   ...   [ends[-1], T) padding, in the scratch slot's page
Requests beyond the step's own end where the last one ends: they have no tokens.

Launches are Triton's own, not `launch.QuickLaunch`: these kernels run inside graphs only, where the host launches none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.kernels.slot_ops import RecordedInputs, SlotTables
from tokenspeed.kernels.triton.launch import ceil_div, power_of_2


@triton.jit
def _copy_pages(pages, out, first_seen, seq_len, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Page numbers of tokens [first_seen, seq_len)."""
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    for first in range(tl.maximum(first_seen, 0) // PAGE_SIZE, num_pages, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        live = cols < num_pages
        tl.store(out + cols, tl.load(pages + cols, mask=live), mask=live)


# Numbers that grow with batch or context are not written into the kernel: each variant would compile anew.
@triton.jit(
    do_not_specialize=[
        *("num_rows", "token_ids_stride", "page_table_stride", "group_stride"),
        *("out_pages_stride", "out_group_stride"),
    ]
)
def _decode_inputs_kernel(
    rows_ptr,
    token_ids_ptr,
    page_table_ptr,
    windows_ptr,
    out_ids_ptr,
    positions_ptr,
    next_positions_ptr,
    seq_lens_ptr,
    flat_slots_ptr,
    out_pages_ptr,
    num_rows,
    token_ids_stride,
    page_table_stride,
    group_stride,
    out_pages_stride,
    out_group_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    start = tl.load(rows_ptr + num_rows + row)
    window = tl.load(windows_ptr + group)
    if group == 0:
        tl.store(out_ids_ptr + row, tl.load(token_ids_ptr + slot * token_ids_stride + start))
        tl.store(positions_ptr + row, start.to(tl.int64))
        tl.store(next_positions_ptr + row, start.to(tl.int64) + 1)
        tl.store(seq_lens_ptr + row, start + 1)
    pages = page_table_ptr + group * group_stride + slot * page_table_stride
    new_page = tl.load(rows_ptr + (2 + group) * num_rows + row)
    tl.store(pages + start // PAGE_SIZE, new_page, mask=new_page >= 0)
    tl.debug_barrier()  # other threads of this program read it below
    page = tl.load(pages + start // PAGE_SIZE).to(tl.int64)
    tl.store(flat_slots_ptr + group * num_rows + row, page * PAGE_SIZE + start % PAGE_SIZE)
    out = out_pages_ptr + group * out_group_stride + row * out_pages_stride
    _copy_pages(pages, out, start + 1 - window, start + 1, PAGE_SIZE, BLOCK)


def _strides(tables: SlotTables, out: RecordedInputs) -> tuple[int, ...]:
    """Of a slot's tokens; of a slot's pages and a group's; of a row's pages in the step and a group's."""
    slots, step = tables.page_tables, out.page_tables
    return tables.token_ids.stride(0), slots.stride(1), slots.stride(0), step.stride(1), step.stride(0)


def decode_inputs(rows: torch.Tensor, tables: SlotTables, out: RecordedInputs) -> None:
    """See `slot_ops.DecodeInputs`."""
    num_rows = rows.shape[1]
    _decode_inputs_kernel[(num_rows, tables.page_tables.shape[0])](
        rows,
        tables.token_ids,
        tables.page_tables,
        tables.windows,
        out.token_ids,
        out.positions,
        out.next_positions,
        out.seq_lens,
        out.flat_slots,
        out.page_tables,
        num_rows,
        *_strides(tables, out),
        PAGE_SIZE=tables.page_size,
        BLOCK=128,
        num_warps=1,
    )


@triton.jit
def _fill_request(
    request,
    group,
    rows_ptr,
    starts_ptr,
    ends_ptr,
    pages_ptr,
    windows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    wanted_ptr,
    next_positions_ptr,
    out_pages_ptr,
    page_table_stride,
    out_pages_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    begin = tl.load(ends_ptr + request - 1, mask=request > 0, other=0)
    end = tl.load(ends_ptr + request)
    slot = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request)
    window = tl.load(windows_ptr + group)
    seq_len = start + end - begin
    if group == 0:
        tl.store(query_start_ptr, 0, mask=request == 0)
        tl.store(query_start_ptr + request + 1, end)
        tl.store(seq_lens_ptr + request, seq_len)
        tl.store(wanted_ptr + request, tl.maximum(end - 1, 0).to(tl.int64))
        tl.store(next_positions_ptr + request, seq_len.to(tl.int64))
    pages = pages_ptr + slot * page_table_stride
    out = out_pages_ptr + request * out_pages_stride
    _copy_pages(pages, out, start + 1 - window, seq_len, PAGE_SIZE, BLOCK_P)


@triton.jit
def _fill_tokens(
    tokens,
    group,
    rows_ptr,
    starts_ptr,
    ends_ptr,
    token_ids_ptr,
    pages_ptr,
    out_ids_ptr,
    positions_ptr,
    flat_slots_ptr,
    num_requests,
    num_tokens,
    scratch_slot,
    token_ids_stride,
    page_table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    inside = tokens < num_tokens
    requests = tl.arange(0, BLOCK_R)
    ends = tl.load(ends_ptr + requests, mask=requests < num_requests, other=0x7FFFFFFF)
    owner = tl.sum((tokens[:, None] >= ends[None, :]).to(tl.int32), axis=1)
    live = owner < num_requests
    begin = tl.load(ends_ptr + owner - 1, mask=live & (owner > 0), other=0)
    slot = tl.load(rows_ptr + owner, mask=live, other=scratch_slot).to(tl.int64)
    start = tl.load(starts_ptr + owner, mask=live, other=0)
    position = tl.where(live, start + tokens - begin, 0)
    if group == 0:
        token_id = tl.load(token_ids_ptr + slot * token_ids_stride + position, mask=inside, other=0)
        tl.store(out_ids_ptr + tokens, token_id, mask=inside)
        tl.store(positions_ptr + tokens, position.to(tl.int64), mask=inside)
    page = tl.load(pages_ptr + slot * page_table_stride + position // PAGE_SIZE, mask=inside, other=0)
    flat_slots = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(flat_slots_ptr + group * num_tokens + tokens, flat_slots, mask=inside)


@triton.jit(
    do_not_specialize=[
        *("num_requests", "num_tokens", "scratch_slot", "token_ids_stride", "page_table_stride", "group_stride"),
        *("out_pages_stride", "out_group_stride"),
    ]
)
def _prefill_inputs_kernel(
    rows_ptr,
    token_ids_ptr,
    page_table_ptr,
    windows_ptr,
    out_ids_ptr,
    positions_ptr,
    flat_slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    wanted_ptr,
    next_positions_ptr,
    out_pages_ptr,
    num_requests,
    num_tokens,
    scratch_slot,
    token_ids_stride,
    page_table_stride,
    group_stride,
    out_pages_stride,
    out_group_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """In each group the first `num_requests` programs own a request each, the others BLOCK tokens."""
    program = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    starts_ptr = rows_ptr + num_requests
    ends_ptr = starts_ptr + num_requests
    pages_ptr = page_table_ptr + group * group_stride
    # Two functions, because the branches of a kernel may not give one name two types.
    if program < num_requests:
        _fill_request(
            program, group, rows_ptr, starts_ptr, ends_ptr, pages_ptr, windows_ptr, query_start_ptr, seq_lens_ptr,
            wanted_ptr, next_positions_ptr, out_pages_ptr + group * out_group_stride, page_table_stride,
            out_pages_stride, PAGE_SIZE, BLOCK_P,
        )  # fmt: skip
    else:
        _fill_tokens(
            (program - num_requests) * BLOCK + tl.arange(0, BLOCK), group, rows_ptr, starts_ptr, ends_ptr,
            token_ids_ptr, pages_ptr, out_ids_ptr, positions_ptr, flat_slots_ptr, num_requests, num_tokens,
            scratch_slot, token_ids_stride, page_table_stride, PAGE_SIZE, BLOCK_R,
        )  # fmt: skip


def prefill_inputs(rows: torch.Tensor, tables: SlotTables, scratch_slot: int, out: RecordedInputs) -> None:
    """See `slot_ops.PrefillInputs`."""
    assert out.wanted is not None, "buffers of a decode step"
    num_requests, num_tokens = rows.shape[1], out.token_ids.shape[0]
    block = 64
    grid = (num_requests + ceil_div(num_tokens, block), tables.page_tables.shape[0])
    _prefill_inputs_kernel[grid](
        rows,
        tables.token_ids,
        tables.page_tables,
        tables.windows,
        out.token_ids,
        out.positions,
        out.flat_slots,
        out.query_start,
        out.seq_lens,
        out.wanted,
        out.next_positions,
        out.page_tables,
        num_requests,
        num_tokens,
        scratch_slot,
        *_strides(tables, out),
        PAGE_SIZE=tables.page_size,
        BLOCK=block,
        BLOCK_R=power_of_2(num_requests),
        BLOCK_P=128,
        num_warps=1,
    )
