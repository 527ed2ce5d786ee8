"""Every implementation of what a device with slots does, against the reference; and the reference against plain lists.

Parametrised over `registry.discover()`, as test_ops_contract.py: on a GPU Triton's too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_device import DEVICE

from tokenspeed.kernels.reference import slot_steps
from tokenspeed.kernels.registry import SLOT_OPS, Need, discover, select_slot_ops
from tokenspeed.kernels.slot_ops import PickedRows, RecordedInputs, SlotSampling, SlotTables

VOCAB, SLOTS, LENGTH, PAGE_SIZE, GROUPS = 4211, 7, 96, 4, 2
NEEDS = [Need(DEVICE, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


def every(op: str) -> Any:
    found = [
        pytest.param(one, need, id=f"{one.name}-{str(need.dtype).removeprefix('torch.')}")
        for one in discover()
        for need in NEEDS
        if one.op == op and one.why_not(need) is None
    ]
    return pytest.mark.parametrize(("implementation", "need"), found)


def test_each_has_a_reference_that_never_refuses() -> None:
    references = {found.op: found for found in discover() if found.name == "reference" and found.op in SLOT_OPS}
    assert set(references) == set(SLOT_OPS)
    assert all(found.why_not(Need(torch.device("meta"), torch.float16)) is None for found in references.values())


def test_the_choice_is_reported() -> None:
    chosen, report = select_slot_ops(Need(torch.device("cpu"), torch.float32))
    assert chosen.sample_rows is slot_steps.sample_rows
    assert [line.partition(" (")[0] for line in report] == [f"{op}: reference" for op in SLOT_OPS]
    assert "triton: Triton kernels run on a GPU" in report[0]


def sampling(generator: torch.Generator) -> SlotSampling:
    """Greedy, plain, each filter alone, all of them."""
    columns = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 0.9, 1.1, 0.8],
        "top_p": [1.0, 1.0, 0.9, 1.0, 1.0, 0.95, 0.6],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.02, 0.0],
    }
    return SlotSampling(
        **{name: torch.tensor(column, device=DEVICE) for name, column in columns.items()},
        top_k=torch.tensor([0, 0, 0, 0, 12, 40, 0], dtype=torch.int32, device=DEVICE),
        seed=torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator).to(DEVICE),
    )


def unfiltered(generator: torch.Generator) -> SlotSampling:
    params = sampling(generator)
    ones, nothing = torch.ones_like(params.top_p), torch.zeros_like(params.min_p)
    return replace(params, top_p=ones, min_p=nothing, top_k=torch.zeros_like(params.top_k))


@every("sample_rows")
def test_the_same_tokens_are_drawn(implementation: Any, need: Need) -> None:
    """Slots in any order, some not at all; rows that fail among them."""
    generator = torch.Generator().manual_seed(11)
    params = sampling(generator)
    slots = torch.tensor([3, 0, 6, 5, 1, 4, 2], dtype=torch.int32, device=DEVICE)[: SLOTS - 1]
    for scale in (0.5, 4.0):
        logits = (torch.randn(len(slots), VOCAB, generator=generator) * scale).to(need.dtype).to(DEVICE)
        logits[2, 17] = torch.nan
        positions = torch.randint(0, LENGTH, (len(slots),), generator=generator).to(DEVICE)
        ours = torch.full((SLOTS, LENGTH), -7, dtype=torch.int64, device=DEVICE)
        truth = ours.clone()
        drawn = implementation.make(need)(logits, slots, positions, params, ours)
        expected = slot_steps.sample_rows(logits, slots, positions, params, truth)
        assert drawn.dtype == torch.int32
        assert drawn.tolist() == expected.tolist()
        assert drawn[2] == -1 and drawn.min() == -1
        assert torch.equal(ours, truth)


def test_philox_gives_the_published_words() -> None:
    """Known answers of Random123's kat_vectors (philox4x32, 10 rounds): counter and key zero, first word."""
    assert int(slot_steps.philox(0, torch.zeros(1, dtype=torch.int64))[0]) == 0x6627E8D5


@every("redraw_rows")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("filters", [True, False])
def test_the_same_tokens_are_drawn_again(implementation: Any, need: Need, masked: bool, filters: bool) -> None:
    """Of a few rows, in any order. One has failed before, one may sample nothing; NaN counts where it is forbidden."""
    generator = torch.Generator().manual_seed(12)
    params = sampling(generator) if filters else unfiltered(generator)
    slots = [3, 0, 6, 5, 1, 4, 2]
    places = [4, 0, 5, 6, 1]
    step = (torch.randn(len(slots), VOCAB, generator=generator) * 2).to(need.dtype).to(DEVICE)
    step[6, 40] = torch.nan
    masks = torch.randint(-(2**31), 2**31, (len(places), -(-VOCAB // 32)), generator=generator).to(torch.int32)
    masks[3, 1] = 0  # the NaN, of a row that counts as usable before
    masks[4] = 0 if masked else masks[4]
    masks[4, -1] = -1 << VOCAB % 32  # bits beyond the vocabulary
    picked = PickedRows(
        places=torch.tensor(places, device=DEVICE),
        slots=torch.tensor([slots[place] for place in places], dtype=torch.int32, device=DEVICE),
        positions=torch.randint(0, LENGTH, (len(places),), generator=generator).to(DEVICE),
    )
    before = torch.tensor([7, 8, 9, 10, 11, -1, 12], dtype=torch.int32, device=DEVICE)
    tables = torch.full((SLOTS, LENGTH), -7, dtype=torch.int64, device=DEVICE)
    logits, bits = (step, masks.to(DEVICE)) if masked else (step[picked.places], None)
    ours, ours_tables, truth, truth_tables = before.clone(), tables.clone(), before.clone(), tables.clone()
    implementation.make(need)(logits, picked, bits, params, ours_tables, ours, filters)
    slot_steps.redraw_rows(logits, picked, bits, params, truth_tables, truth, filters)
    assert ours.tolist() == truth.tolist()
    assert torch.equal(ours_tables, truth_tables)
    assert truth[[2, 3, 5, 6]].tolist() == [9, 10, -1, -1] and int(truth[1]) == (-1 if masked else truth[1])
    assert (truth_tables != -7).sum() == 4, "of the five all but the one that had failed"


@every("redraw_rows")
def test_a_mask_is_as_good_as_logits_without_the_others(implementation: Any, need: Need) -> None:
    """Whatever a row filters by; and a row under a mask that forbids nothing is drawn as it was."""
    generator = torch.Generator().manual_seed(13)
    params = sampling(generator)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE)
    positions = torch.full((SLOTS,), 9, dtype=torch.int64, device=DEVICE)
    logits = torch.randn(SLOTS, VOCAB, generator=generator).to(need.dtype).to(DEVICE)
    masks = torch.randint(-(2**31), 2**31, (SLOTS, -(-VOCAB // 32)), generator=generator).to(torch.int32).to(DEVICE)
    masks[5] = -1
    bits = ((masks[:, :, None] >> torch.arange(32, device=DEVICE)) & 1).flatten(1)[:, :VOCAB].bool()
    tables = torch.zeros((SLOTS, LENGTH), dtype=torch.int64, device=DEVICE)
    wanted = slot_steps.sample_rows(logits.masked_fill(~bits, -torch.inf), slots, positions, params, tables)
    picked = PickedRows(slots.long(), slots, positions)
    drawn = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    implementation.make(need)(logits, picked, masks, params, tables.zero_(), drawn, True)
    assert drawn.tolist() == wanted.tolist() == tables[:, 9].tolist()
    assert drawn[5] == slot_steps.sample_rows(logits, slots, positions, params, tables)[5]
    assert all(bits[row, token] for row, token in enumerate(drawn.tolist()))


def tables() -> SlotTables:
    pages = torch.randperm(GROUPS * SLOTS * (LENGTH // PAGE_SIZE)).to(torch.int32).view(GROUPS, SLOTS, -1).to(DEVICE)
    windows = torch.tensor([1 << 30, 10], dtype=torch.int32, device=DEVICE)
    return SlotTables(torch.randint(0, VOCAB, (SLOTS, LENGTH), device=DEVICE), pages, windows, PAGE_SIZE)


def buffers(num_tokens: int, num_requests: int, is_prompt: bool) -> RecordedInputs:
    def filled(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -5, dtype=dtype, device=DEVICE)

    return RecordedInputs(
        token_ids=filled(num_tokens),
        positions=filled(num_tokens),
        flat_slots=filled(GROUPS, num_tokens),
        query_start=filled(num_requests + 1, dtype=torch.int32),
        seq_lens=filled(num_requests, dtype=torch.int32),
        page_tables=filled(GROUPS, num_requests, LENGTH // PAGE_SIZE, dtype=torch.int32),
        wanted=filled(num_requests) if is_prompt else None,
        next_positions=filled(num_requests),
    )


def assert_same(ours: RecordedInputs, truth: RecordedInputs) -> None:
    for name in RecordedInputs.__slots__:
        left, right = getattr(ours, name), getattr(truth, name)
        assert left is right is None or torch.equal(left, right), name


@every("decode_inputs")
def test_the_same_inputs_of_decodes(implementation: Any, need: Need) -> None:
    mine, known = (both := tables()), SlotTables(both.token_ids, both.page_tables.clone(), both.windows, PAGE_SIZE)
    rows = torch.tensor([[3, 0, 4, 6], [0, 16, 95, 0], [-1, 900, -1, -1], [901, -1, 902, -1]], dtype=torch.int32)
    ours, truth = buffers(4, 4, False), buffers(4, 4, False)
    implementation.make(need)(rows.to(DEVICE), mine, ours)
    slot_steps.decode_inputs(rows.to(DEVICE), known, truth)
    assert_same(ours, truth)
    assert torch.equal(mine.page_tables, known.page_tables)
    assert known.page_tables[0, 0, 4] == 900 and known.page_tables[1, 4, 23] == 902
    assert truth.flat_slots[0, 1] == 900 * PAGE_SIZE and truth.token_ids[2] == both.token_ids[4, 95]


@every("prefill_inputs")
def test_the_same_inputs_of_prompts(implementation: Any, need: Need) -> None:
    """The last request is padding, and so are five tokens."""
    both = tables()
    rows = torch.tensor([[2, 0, 4, 6], [0, 7, 90, 0], [30, 31, 37, 37]], dtype=torch.int32, device=DEVICE)
    ours, truth = buffers(42, 4, True), buffers(42, 4, True)
    implementation.make(need)(rows, both, 6, ours)
    slot_steps.prefill_inputs(rows, both, 6, truth)
    assert_same(ours, truth)
    assert truth.positions.tolist() == [*range(30), 7, *range(90, 96), *[0] * 5]
    assert truth.seq_lens.tolist() == [30, 8, 96, 0] and truth.query_start.tolist() == [0, 30, 31, 37, 37]
