"""The first kernel of a recorded step, of prompts and of decodes, against plain lists: one to three cache groups."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.slot_ops import RecordedInputs, SlotTables
from tokenspeed.kernels.triton.step_inputs import decode_inputs, prefill_inputs

PAGE_SIZE, SLOTS, LENGTH, SCRATCH_SLOT, SCRATCH_PAGE = 4, 6, 700, 5, 900
UNTOUCHED = -5
WINDOWS = {1: [1 << 30], 2: [1 << 30, 10], 3: [9, 1 << 30, 1]}


def slot_tables(num_groups: int, seed: int) -> SlotTables:
    """Random tokens; no page number stands twice, but for the scratch slot's."""
    pages = list(range(num_groups * SLOTS * (LENGTH // PAGE_SIZE)))
    random.Random(seed).shuffle(pages)
    page_tables = torch.tensor(pages, dtype=torch.int32, device=DEVICE).view(num_groups, SLOTS, -1)
    page_tables[:, SCRATCH_SLOT] = SCRATCH_PAGE
    windows = torch.tensor(WINDOWS[num_groups], dtype=torch.int32, device=DEVICE)
    return SlotTables(torch.randint(0, 1000, (SLOTS, LENGTH), device=DEVICE), page_tables, windows, PAGE_SIZE)


def check_pages(out: RecordedInputs, tables: SlotTables, requests: list[tuple[int, int, int]]) -> None:
    """Page numbers from the window of the first token up to the last token; nothing else is touched.

    Args:
        requests: (slot, start, tokens).
    """
    for group, window in enumerate(tables.windows.tolist()):
        for row, (slot, start, count) in enumerate(requests):
            first = max(0, start + 1 - window) // PAGE_SIZE
            end = -(-(start + count) // PAGE_SIZE)
            copied, known = out.page_tables[group, row], tables.page_tables[group, slot]
            assert torch.equal(copied[first:end], known[first:end])
            assert (copied[:first] == UNTOUCHED).all() and (copied[end:] == UNTOUCHED).all()


def flat_slots(tables: SlotTables, tokens: list[tuple[int, int]]) -> list[list[int]]:
    """Where (slot, position) pairs live, in each group."""
    return [
        [int(table[slot, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE for slot, position in tokens]
        for table in tables.page_tables
    ]


def buffers(num_tokens: int, num_requests: int, num_groups: int) -> RecordedInputs:
    def filled(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, UNTOUCHED, dtype=dtype, device=DEVICE)

    return RecordedInputs(
        token_ids=filled(num_tokens),
        positions=filled(num_tokens),
        flat_slots=filled(num_groups, num_tokens),
        query_start=filled(num_requests + 1, dtype=torch.int32),
        seq_lens=filled(num_requests, dtype=torch.int32),
        page_tables=filled(num_groups, num_requests, LENGTH // PAGE_SIZE, dtype=torch.int32),
        wanted=filled(num_requests),
        next_positions=filled(num_requests),
    )


@pytest.mark.parametrize("num_groups", list(WINDOWS))
@pytest.mark.parametrize(
    ("size", "max_requests", "requests"),
    [
        (16, 3, [(2, 0, 5), (0, 7, 1), (4, 3, 4)]),  # (slot, start, tokens)
        (16, 5, [(1, 9, 16)]),
        (70, 1, [(3, 600, 66)]),
        (130, 4, [(3, 0, 64), (1, 1, 64)]),
        (16, 2, []),
    ],
)
def test_every_token_finds_its_request(
    size: int, max_requests: int, requests: list[tuple[int, int, int]], num_groups: int
) -> None:
    tables = slot_tables(num_groups, size)
    ends = [sum(count for _, _, count in requests[: index + 1]) for index in range(len(requests))]
    total = ends[-1] if ends else 0
    padding = max_requests - len(requests)
    rows = torch.tensor(
        [
            [slot for slot, _, _ in requests] + [SCRATCH_SLOT] * padding,
            [start for _, start, _ in requests] + [0] * padding,
            ends + [total] * padding,
            [0] * max_requests,
        ],
        dtype=torch.int32,
        device=DEVICE,
    )
    out = buffers(size, max_requests, num_groups)
    prefill_inputs(rows, tables, SCRATCH_SLOT, out)

    tokens = [(slot, start + i) for slot, start, count in requests for i in range(count)]
    tokens += [(SCRATCH_SLOT, 0)] * (size - total)
    assert out.positions.tolist() == [position for _, position in tokens]
    assert out.token_ids.tolist() == [int(tables.token_ids[slot, position]) for slot, position in tokens]
    assert out.flat_slots.tolist() == flat_slots(tables, tokens)
    assert out.query_start.tolist() == [0, *ends, *[total] * padding]
    lens = [start + count for _, start, count in requests]
    assert out.seq_lens.tolist() == lens + [0] * padding
    assert out.next_positions.tolist() == lens + [0] * padding
    assert out.wanted is not None
    assert out.wanted.tolist() == [end - 1 for end in ends] + [max(total - 1, 0)] * padding
    check_pages(out, tables, requests)


@pytest.mark.parametrize("num_groups", list(WINDOWS))
def test_decode_rows(num_groups: int) -> None:
    """Two rows bring pages: one for every group, one for the last alone."""
    tables = slot_tables(num_groups, 1)
    slots, starts = [3, 0, 4, SCRATCH_SLOT], [0, 16, 640, 0]
    new_pages = [[-1, -1 if group < num_groups - 1 else 7000, 8000 + group, -1] for group in range(num_groups)]
    wanted = tables.page_tables.clone()
    wanted[:, 4, 640 // PAGE_SIZE] = torch.arange(8000, 8000 + num_groups)
    wanted[-1, 0, 16 // PAGE_SIZE] = 7000
    out = buffers(4, 4, num_groups)
    decode_inputs(torch.tensor([slots, starts, *new_pages], dtype=torch.int32, device=DEVICE), tables, out)
    assert torch.equal(tables.page_tables, wanted)
    tokens = list(zip(slots, starts, strict=True))
    assert out.token_ids.tolist() == [int(tables.token_ids[token]) for token in tokens]
    assert out.positions.tolist() == starts
    assert out.next_positions.tolist() == out.seq_lens.tolist() == [start + 1 for start in starts]
    assert out.flat_slots.tolist() == flat_slots(tables, tokens)
    check_pages(out, tables, [(slot, start, 1) for slot, start in tokens])
