"""The first kernel of a recorded prompt step against plain lists."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.triton.step_inputs import PrefillInputs, prefill_inputs

PAGE_SIZE, SLOTS, LENGTH, SCRATCH_SLOT, SCRATCH_PAGE = 4, 6, 700, 5, 900
UNTOUCHED = -5


def buffers(num_tokens: int, num_requests: int) -> PrefillInputs:
    def filled(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, UNTOUCHED, dtype=dtype, device=DEVICE)

    return PrefillInputs(
        token_ids=filled(num_tokens),
        positions=filled(num_tokens),
        flat_slots=filled(num_tokens),
        query_start=filled(num_requests + 1, dtype=torch.int32),
        seq_lens=filled(num_requests, dtype=torch.int32),
        page_table=filled(num_requests, LENGTH // PAGE_SIZE, dtype=torch.int32),
        wanted=filled(num_requests),
        next_positions=filled(num_requests),
    )


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
def test_every_token_finds_its_request(size: int, max_requests: int, requests: list[tuple[int, int, int]]) -> None:
    rng = random.Random(size)
    token_ids = torch.randint(0, 1000, (SLOTS, LENGTH), device=DEVICE)
    pages = list(range(SLOTS * (LENGTH // PAGE_SIZE)))
    rng.shuffle(pages)
    page_table = torch.tensor(pages, dtype=torch.int32, device=DEVICE).view(SLOTS, -1)
    page_table[SCRATCH_SLOT] = SCRATCH_PAGE
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
    out = buffers(size, max_requests)
    prefill_inputs(rows, token_ids, page_table, PAGE_SIZE, SCRATCH_SLOT, out)

    tokens = [(slot, start + i) for slot, start, count in requests for i in range(count)]
    tokens += [(SCRATCH_SLOT, 0)] * (size - total)
    assert out.positions.tolist() == [position for _, position in tokens]
    assert out.token_ids.tolist() == [int(token_ids[slot, position]) for slot, position in tokens]
    expected = [
        int(page_table[slot, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE for slot, position in tokens
    ]
    assert out.flat_slots.tolist() == expected
    assert out.query_start.tolist() == [0, *ends, *[total] * padding]
    lens = [start + count for _, start, count in requests]
    assert out.seq_lens.tolist() == lens + [0] * padding
    assert out.next_positions.tolist() == lens + [0] * padding
    assert out.wanted.tolist() == [end - 1 for end in ends] + [max(total - 1, 0)] * padding
    for row, (slot, start, count) in enumerate(requests):
        used = -(-(start + count) // PAGE_SIZE)
        assert out.page_table[row, :used].tolist() == page_table[slot, :used].tolist()
        assert (out.page_table[row, used:] == UNTOUCHED).all()
