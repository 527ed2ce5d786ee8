"""The first kernel of a decode graph: from slots and lengths to what the model and attention read.

Bytes     a few hundred a row; launch latency is the cost, hidden by programmatic dependent launch of what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


# Numbers that grow with batch or context are not written into the kernel: each variant would compile anew.
@triton.jit(do_not_specialize=["num_rows", "token_ids_stride", "page_table_stride", "out_pages_stride"])
def _decode_inputs_kernel(
    rows_ptr,
    token_ids_ptr,
    page_table_ptr,
    out_ids_ptr,
    positions_ptr,
    next_positions_ptr,
    seq_lens_ptr,
    flat_slots_ptr,
    out_pages_ptr,
    num_rows,
    token_ids_stride,
    page_table_stride,
    out_pages_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    start = tl.load(rows_ptr + num_rows + row)
    tl.store(out_ids_ptr + row, tl.load(token_ids_ptr + slot * token_ids_stride + start))
    tl.store(positions_ptr + row, start.to(tl.int64))
    tl.store(next_positions_ptr + row, start.to(tl.int64) + 1)
    tl.store(seq_lens_ptr + row, start + 1)
    pages = page_table_ptr + slot * page_table_stride
    page = tl.load(pages + start // PAGE_SIZE).to(tl.int64)
    tl.store(flat_slots_ptr + row, page * PAGE_SIZE + start % PAGE_SIZE)
    num_pages = start // PAGE_SIZE + 1
    for first in range(0, num_pages, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        live = cols < num_pages
        tl.store(out_pages_ptr + row * out_pages_stride + cols, tl.load(pages + cols, mask=live), mask=live)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Static buffers of a graph for R rows: token_ids, positions, next_positions, flat_slots [R] int64; seq_lens [R]
    int32; page_table [R, P] int32."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    seq_lens: torch.Tensor
    flat_slots: torch.Tensor
    page_table: torch.Tensor


def decode_inputs(
    rows: torch.Tensor, token_ids: torch.Tensor, page_table: torch.Tensor, page_size: int, out: DecodeInputs
) -> None:
    """Fill `out` for decode rows.

    Args:
        rows: [2, R] int32: slots, then starts (the position of each row's one token).
        token_ids: [S, L] int64, page_table: [S, P] int32, by slot.
    """
    num_rows = rows.shape[1]
    _decode_inputs_kernel[(num_rows,)](
        rows,
        token_ids,
        page_table,
        out.token_ids,
        out.positions,
        out.next_positions,
        out.seq_lens,
        out.flat_slots,
        out.page_table,
        num_rows,
        token_ids.stride(0),
        page_table.stride(0),
        out.page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=128,
        num_warps=1,
    )
