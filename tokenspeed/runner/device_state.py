"""What the device remembers of each slot between steps: token ids and page table. Plans only bring changes.

token_ids[slot]    [prompt | output so far | the token just sampled | unused]
                   0                        length                           max_model_len + 1
page_table[slot]   page of tokens [i * page_size, (i + 1) * page_size) at column i
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.protocol.step import Admission, Row


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers as a tensor on the device. To a GPU they travel through pinned memory, so that nobody waits for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class DeviceState:
    """Tensors indexed by slot. Mutated only by the runner's thread."""

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, scratch_page: int, device: torch.device):
        self.page_size = page_size
        self.device = device
        max_pages = -(-(max_model_len + 1) // page_size)
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.page_table = torch.full((max_num_seqs, max_pages), scratch_page, dtype=torch.int32, device=device)
        self._num_pages = [0] * max_num_seqs

    def admit(self, admission: Admission) -> None:
        """Fill a slot with a request's known tokens and pages; forgets what was there."""
        slot = admission.slot
        self.token_ids[slot, : len(admission.token_ids)] = self._tensor(admission.token_ids)
        self._num_pages[slot] = 0
        self._append_pages(slot, admission.pages[0])

    def grow(self, rows: list[Row]) -> None:
        """Append the pages that the rows bring."""
        for row in rows:
            if row.new_pages and row.new_pages[0]:
                self._append_pages(row.slot, row.new_pages[0])

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        start = self._num_pages[slot]
        end = start + len(pages)
        self.page_table[slot, start:end] = to_device(pages, torch.int32, self.device)
        self._num_pages[slot] = end

    def gather(self, rows: list[Row]) -> StepInputs:
        """Token ids, positions and attention batch of some rows, row after row."""
        slots, positions = self._flat_slots_and_positions(rows)
        row_slots = slots if len(slots) == len(rows) else self._tensor([row.slot for row in rows])
        query_lens = [row.num_tokens for row in rows]
        seq_lens = [row.start + row.num_tokens for row in rows]
        width = -(-max(seq_lens) // self.page_size)
        page_table = self.page_table[row_slots, :width]
        token_pages = self.page_table[slots, positions // self.page_size]
        flat_slots = token_pages.to(torch.int64) * self.page_size + positions % self.page_size
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        batch = AttentionBatch(
            query_start=to_device(starts, torch.int32, self.device),
            seq_lens=to_device(seq_lens, torch.int32, self.device),
            page_table=page_table,
            slots=flat_slots,
            num_requests=len(rows),
            num_tokens=starts[-1],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )
        return StepInputs(self.token_ids[slots, positions], positions, batch)

    def append_sampled(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens where the next step reads them; [N] int64 each."""
        self.token_ids[slots, positions] = token_ids

    def _flat_slots_and_positions(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        if all(row.num_tokens == 1 for row in rows):
            return self._tensor([row.slot for row in rows]), self._tensor([row.start for row in rows])
        lens = self._tensor([row.num_tokens for row in rows])
        num_tokens = sum(row.num_tokens for row in rows)
        slots = torch.repeat_interleave(self._tensor([row.slot for row in rows]), lens, output_size=num_tokens)
        positions = torch.cat([torch.arange(row.start, row.start + row.num_tokens, device=self.device) for row in rows])
        return slots, positions

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


class StepInputs:
    """What the model's forward takes: token_ids, positions [T] int64 and the attention batch."""

    __slots__ = ("batch", "positions", "token_ids")

    def __init__(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.batch = batch
