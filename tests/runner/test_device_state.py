"""What the device remembers of each slot, against plain lists."""

from __future__ import annotations

import torch

from tokenspeed.cache.spec import GONE, GroupSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row
from tokenspeed.runner.device_state import ALL_TOKENS, DeviceState

PAGE_SIZE, SCRATCH = 4, 99


def state(*windows: int) -> DeviceState:
    """A group that sees everything, and one for each window."""
    groups = [GroupSpec("full", "full", PAGE_SIZE, 1, SCRATCH)]
    groups += [GroupSpec(f"w{window}", "sliding_window", PAGE_SIZE, 1, SCRATCH, window) for window in windows]
    return DeviceState(3, 19, groups, torch.device("cpu"))


def admission(slot: int, token_ids: list[int], *pages: list[int]) -> Admission:
    return Admission(slot, "r", 0, token_ids, len(token_ids), pages, SamplingParams(seed=0))


def row(slot: int, start: int, num_tokens: int, *new_pages: tuple[int, ...]) -> Row:
    return Row(slot, start, num_tokens, tuple(list(pages) for pages in new_pages), True, False)


def test_a_gather_of_chunks_decodes_and_prompts() -> None:
    now = state()
    now.admit(admission(1, [10, 11, 12, 13, 14, 15], [7, 3]))
    now.admit(admission(0, [20, 21], [5]))
    now.admit(admission(2, [30, 31, 32, 33, 34, 35, 36, 37, 38], [1, 0, 8]))
    inputs = now.gather([row(0, 1, 1), row(2, 3, 4), row(1, 0, 6)])
    batch = inputs.batch
    assert inputs.token_ids.tolist() == [21, 33, 34, 35, 36, 10, 11, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [1, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert batch.slots.tolist() == [5 * 4 + 1, 1 * 4 + 3, 0, 1, 2, 28, 29, 30, 31, 12, 13]
    assert (batch.query_start.tolist(), batch.seq_lens.tolist()) == ([0, 1, 5, 11], [2, 7, 6])
    assert (batch.query_lens_host, batch.seq_lens_host) == ([1, 4, 6], [2, 7, 6])
    assert (batch.num_requests, batch.num_tokens) == (3, 11)
    assert batch.page_table.tolist() == [[5, SCRATCH], [1, 0], [7, 3]]
    assert (batch.query_start.dtype, batch.seq_lens.dtype, batch.page_table.dtype) == (torch.int32,) * 3
    assert (inputs.token_ids.dtype, inputs.positions.dtype, batch.slots.dtype) == (torch.int64,) * 3


def test_decode_rows_read_what_was_sampled_and_grow_page_by_page() -> None:
    now = state()
    now.admit(admission(0, [1, 2, 3], [4]))
    now.admit(admission(2, [5, 6, 7, 8], [6]))
    now.append_sampled(torch.tensor([2, 0]), torch.tensor([4, 3]), torch.tensor([50, 40]))
    rows = [row(0, 3, 1), row(2, 4, 1, (9,))]
    now.grow(rows)
    inputs = now.gather(rows)
    assert inputs.token_ids.tolist() == [40, 50]
    assert inputs.batch.slots.tolist() == [4 * 4 + 3, 9 * 4]
    assert inputs.batch.page_table.tolist() == [[4, SCRATCH], [6, 9]]
    assert inputs.batch.query_start.tolist() == [0, 1, 2]


def test_an_admission_forgets_the_slots_pages() -> None:
    now = state()
    now.admit(admission(0, [1] * 9, [4, 5, 6]))
    now.admit(admission(0, [2, 3], [8]))
    now.grow([row(0, 2, 3, (9,))])
    assert now.gather([row(0, 0, 5)]).batch.page_table.tolist() == [[8, 9]]


def test_the_last_token_of_the_longest_sequence_has_its_place() -> None:
    """19 tokens and the one sampled after them: 20 places on 5 pages."""
    now = state()
    now.admit(admission(1, list(range(19)), [0, 1, 2, 3, 4]))
    now.append_sampled(torch.tensor([1]), torch.tensor([19]), torch.tensor([77]))
    assert now.token_ids[1, 19] == 77
    assert now.gather([row(1, 18, 1)]).batch.slots.tolist() == [4 * 4 + 2]


def test_a_fresh_slot_names_the_scratch_page_only() -> None:
    now = state()
    now.admit(admission(2, [1, 2, 3, 4, 5], []))
    assert set((now.gather([row(2, 0, 5)]).batch.slots // PAGE_SIZE).tolist()) == {SCRATCH}


def test_every_group_has_its_own_pages() -> None:
    now = state(4, 6)
    now.admit(admission(1, list(range(9)), [7, 3, 2], [8, 1, 0], [5, 4, 6]))
    now.admit(admission(0, list(range(20, 24)), [10], [11], [12]))
    rows = [row(0, 4, 1, (13,), (14,), (15,)), row(1, 5, 4, (), ())]
    now.grow(rows)
    batch = now.gather(rows).batch
    assert [batch.group(index).page_table.tolist() for index in range(3)] == [
        [[10, 13, SCRATCH], [7, 3, 2]],
        [[11, 14, SCRATCH], [8, 1, 0]],
        [[12, 15, SCRATCH], [5, 4, 6]],
    ]
    assert [batch.group(index).slots.tolist() for index in range(3)] == [
        [52, 13, 14, 15, 8],
        [56, 5, 6, 7, 0],
        [60, 17, 18, 19, 24],
    ]
    assert len(batch.other_groups) == 2 and not batch.group(1).other_groups
    for group in batch.other_groups:
        assert group.seq_lens is batch.seq_lens and group.query_start is batch.query_start
        assert (group.query_lens_host, group.seq_lens_host) == (batch.query_lens_host, batch.seq_lens_host)
    assert now.windows.tolist() == [ALL_TOKENS, 4, 6]


def test_pages_that_are_gone_read_as_scratch() -> None:
    """A prefix hit or a readmission may begin behind the window: what stood there belongs to others now."""
    now = state(4)
    now.admit(admission(2, list(range(10)), [1, 2, 3], [GONE, GONE, 4]))
    rows = [row(2, 8, 2)]
    assert now.gather(rows).batch.group(1).page_table.tolist() == [[SCRATCH, SCRATCH, 4]]
    now.grow([row(2, 12, 1, (5,), (6,))])
    assert now.gather([row(2, 12, 1)]).batch.group(1).page_table.tolist() == [[SCRATCH, SCRATCH, 4, 6]]
