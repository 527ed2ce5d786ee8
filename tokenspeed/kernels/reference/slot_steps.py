"""The truth for slots: inputs of recorded steps row by row, and one row's draw after another by sorting."""

from __future__ import annotations

import math

import torch

from tokenspeed.kernels.reference.pointwise import reference
from tokenspeed.kernels.slot_ops import PickedRows, RecordedInputs, SlotSampling, SlotTables

MASS = 2.0**40
"""Whole numbers, the best token's mass: sums do not depend on the order of additions."""
LOW_WORD = 0xFFFFFFFF


def decode_inputs(rows: torch.Tensor, tables: SlotTables, out: RecordedInputs) -> None:
    """See `slot_ops.DecodeInputs`."""
    slots, starts, *new_pages = rows.tolist()
    for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        for group, pages in enumerate(new_pages):
            if pages[row] >= 0:
                tables.page_tables[group, slot, start // tables.page_size] = pages[row]
        _fill_request(row, slot, start, 1, tables, out)
        _fill_token(row, slot, start, tables, out)


def prefill_inputs(rows: torch.Tensor, tables: SlotTables, scratch_slot: int, out: RecordedInputs) -> None:
    """See `slot_ops.PrefillInputs`."""
    assert out.wanted is not None, "buffers of a decode step"
    begin = 0
    out.query_start[0] = 0
    for row, (slot, start, end) in enumerate(zip(*rows[:3].tolist(), strict=True)):
        _fill_request(row, slot, start, end - begin, tables, out)
        out.query_start[row + 1] = end
        out.wanted[row] = max(end - 1, 0)
        for token in range(begin, end):
            _fill_token(token, slot, start + token - begin, tables, out)
        begin = end
    for token in range(begin, len(out.token_ids)):
        _fill_token(token, scratch_slot, 0, tables, out)


def _fill_request(row: int, slot: int, start: int, count: int, tables: SlotTables, out: RecordedInputs) -> None:
    out.seq_lens[row] = out.next_positions[row] = start + count
    for group, window in enumerate(tables.windows.tolist()):
        first, end = max(0, start + 1 - window) // tables.page_size, -(-(start + count) // tables.page_size)
        out.page_tables[group, row, first:end] = tables.page_tables[group, slot, first:end]


def _fill_token(token: int, slot: int, position: int, tables: SlotTables, out: RecordedInputs) -> None:
    out.token_ids[token] = tables.token_ids[slot, position]
    out.positions[token] = position
    pages = tables.page_tables[:, slot, position // tables.page_size].long()
    out.flat_slots[:, token] = pages * tables.page_size + position % tables.page_size


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """See `slot_ops.SampleRows`. Waits for the device: not for recorded steps."""
    drawn = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        drawn[row] = _draw(logits[row].float(), slot, position, sampling)
        token_ids[slot, position] = max(int(drawn[row]), 0)
    return drawn


def _draw(x: torch.Tensor, slot: int, position: int, sampling: SlotSampling) -> int:
    if x.isnan().any() or not x.max().isfinite():
        return -1
    temperature = float(sampling.temperature[slot])
    if temperature > 0:
        top_k, top_p, min_p = int(sampling.top_k[slot]), float(sampling.top_p[slot]), float(sampling.min_p[slot])
        stays = x >= threshold(x, temperature, top_k, top_p, min_p)
        seed = int(sampling.seed[slot]) + position * 0x1E3779B97F4A7C15
        x = (x / temperature + gumbel(seed, len(x), x.device)).masked_fill(~stays, -math.inf)
    return int((x == x.max()).nonzero()[0])


def threshold(x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit of a row [V] float32 that may be drawn: see `slot_ops.SampleRows`."""
    order = x.sort(descending=True).values
    least = -math.inf
    if 0 < top_k < len(x):
        least = float(order[top_k - 1])
    if min_p > 0:
        least = max(least, float(order[0]) + temperature * math.log(max(min_p, 1e-30)))
    if top_p < 1:
        masses = (((order - order[0]) / temperature).exp() * MASS).long() * (order >= least)
        total = int(masses.sum())
        need = min(max(math.ceil(total * top_p), 1), total)
        least = max(least, float(order[int((masses.cumsum(0) < need).sum())]))
    return least


def gumbel(seed: int, size: int, device: torch.device) -> torch.Tensor:
    """Noise of the tokens 0 to `size` under a key modulo 2**64: [size] float32."""
    words = philox(seed, torch.arange(size, device=device))
    signed = torch.where(words >= 1 << 31, LOW_WORD - words, words)  # as its int32 x, or ~x where x is negative
    uniform = (signed.float() * 4.6566127342e-10).clamp(min=1e-10)
    return -(-uniform.log()).log()


def philox(seed: int, counters: torch.Tensor) -> torch.Tensor:
    """First word of Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) of counters
    (c, 0, 0, 0), [n] int64 below 2**32: [n] int64 below 2**32. A product wraps at 64 bits, which keeps both words."""
    key = [seed & LOW_WORD, (seed >> 32) & LOW_WORD]
    word = [counters, *(torch.zeros_like(counters) for _ in range(3))]
    for _ in range(10):
        first, second = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57
        word = [
            ((second >> 32) & LOW_WORD) ^ word[1] ^ key[0],
            second & LOW_WORD,
            ((first >> 32) & LOW_WORD) ^ word[3] ^ key[1],
            first & LOW_WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & LOW_WORD, (key[1] + 0xBB67AE85) & LOW_WORD]
    return word[0]


def redraw_rows(
    logits: torch.Tensor,
    rows: PickedRows,
    masks: torch.Tensor | None,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
    drawn: torch.Tensor,
    filters: bool,
) -> None:
    """See `slot_ops.RedrawRows`. Waits for the device: not for recorded steps."""
    picked = zip(rows.places.tolist(), rows.slots.tolist(), rows.positions.tolist(), strict=True)
    for row, (place, slot, position) in enumerate(picked):
        if drawn[place] < 0:
            continue
        x = logits[row if masks is None else place].float()
        if masks is not None:
            x = x.masked_fill(~_allowed(masks[row], len(x)) & ~x.isnan(), -math.inf)
        drawn[place] = _draw(x, slot, position, sampling)
        token_ids[slot, position] = max(int(drawn[place]), 0)


def _allowed(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[V] bool from bits."""
    return ((mask[:, None] >> torch.arange(32, device=mask.device)) & 1).flatten()[:vocab_size].bool()


IMPLEMENTATIONS = (
    reference("decode_inputs", decode_inputs, can_record=False),
    reference("prefill_inputs", prefill_inputs, can_record=False),
    reference("sample_rows", sample_rows, can_record=False),
    reference("redraw_rows", redraw_rows, can_record=False),
)
