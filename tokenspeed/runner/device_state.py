"""What the device remembers of each slot between steps: token ids and page tables. Plans only bring changes.

token_ids[slot]             [prompt | output so far | the token just sampled | unused]
                            0                        length                           max_model_len + 1
page_tables[group, slot]    page of tokens [i * page_size, (i + 1) * page_size) at column i

Pages of a sliding-window group that no query sees any more may have gone to others. Their numbers stay in the table
until the slot is filled again; an admission that starts behind such pages brings `GONE` in their place, and the table
then names the scratch page. Neither is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.step import Admission, Row

ALL_TOKENS = 2**30
"""The window of a group whose queries see everything."""


class DeviceState:
    """Tensors indexed by slot. Mutated only by the runner's thread.

    Fields:
        token_ids: [S, max_model_len + 1] int64.
        page_tables: [G, S, max_pages] int32; a fresh slot's names the scratch page only.
        windows: [G] int32, tokens that a query of the group sees.
        scratch_page: whose contents no request reads.
    """

    def __init__(self, num_slots: int, max_model_len: int, groups: Sequence[GroupSpec], device: torch.device) -> None:
        self.page_size = groups[0].page_size
        self.scratch_page = groups[0].num_pages
        self.device = device
        shape = (len(groups), num_slots, table_width(max_model_len, self.page_size))
        self.token_ids = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int64, device=device)
        self.page_tables = torch.full(shape, self.scratch_page, dtype=torch.int32, device=device)
        windows = [group.window or ALL_TOKENS for group in groups]
        self.windows = torch.tensor(windows, dtype=torch.int32, device=device)
        self._num_pages = [[0] * num_slots for _ in groups]

    def admit(self, admission: Admission) -> None:
        """Fill a slot with a request's known tokens and pages; forgets what was there."""
        slot = admission.slot
        self.token_ids[slot, : len(admission.token_ids)] = self._tensor(admission.token_ids)
        for group, pages in enumerate(admission.pages):
            self._num_pages[group][slot] = 0
            self._append_pages(group, slot, [self.scratch_page if page < 0 else page for page in pages])

    def grow(self, rows: Sequence[Row]) -> None:
        """Append the pages that the rows bring."""
        for row in (rows[index] for index in self.bringing(rows)):
            for group, pages in enumerate(row.new_pages):
                if pages:
                    self._append_pages(group, row.slot, pages)

    def bringing(self, rows: Sequence[Row]) -> list[int]:
        """Places of the rows that bring pages: as a rule few, a decode row does every page_size steps."""
        nothing: tuple[list[int], ...] = ([],) * len(self._num_pages)
        return [index for index, row in enumerate(rows) if row.new_pages != nothing]

    def note_pages(self, slot: int, new_pages: tuple[list[int], ...]) -> None:
        """The pages that a row of the slot brings are appended by somebody else."""
        for group, pages in enumerate(new_pages):
            self._num_pages[group][slot] += len(pages)

    def _append_pages(self, group: int, slot: int, pages: list[int]) -> None:
        start = self._num_pages[group][slot]
        end = start + len(pages)
        self.page_tables[group, slot, start:end] = to_device(pages, torch.int32, self.device)
        self._num_pages[group][slot] = end

    def gather(self, rows: list[Row]) -> StepInputs:
        """Token ids, positions and attention batch of some rows, row after row."""
        slots, positions = self._flat_slots_and_positions(rows)
        row_slots = slots if len(slots) == len(rows) else self._tensor([row.slot for row in rows])
        query_lens = [row.num_tokens for row in rows]
        seq_lens = [row.start + row.num_tokens for row in rows]
        width = -(-max(seq_lens) // self.page_size)
        starts = [0, *accumulate(query_lens)]
        query_start = to_device(starts, torch.int32, self.device)
        lens = to_device(seq_lens, torch.int32, self.device)
        columns, offsets = positions // self.page_size, positions % self.page_size
        batches = [
            AttentionBatch(
                query_start=query_start,
                seq_lens=lens,
                page_table=page_table[row_slots, :width],
                slots=page_table[slots, columns].to(torch.int64) * self.page_size + offsets,
                num_requests=len(rows),
                num_tokens=starts[-1],
                query_lens_host=query_lens,
                seq_lens_host=seq_lens,
            )
            for page_table in self.page_tables
        ]
        return StepInputs(self.token_ids[slots, positions], positions, with_groups(batches))

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


def table_width(max_model_len: int, page_size: int) -> int:
    """Columns of a page table; the token sampled last has a place too."""
    return -(-(max_model_len + 1) // page_size)


def with_groups(batches: Sequence[AttentionBatch]) -> AttentionBatch:
    """The batch of group 0, which knows those of the other groups."""
    batches[0].other_groups = tuple(batches[1:])
    return batches[0]


class StepInputs:
    """What the model's forward takes: token_ids, positions [T] int64 and the attention batch."""

    __slots__ = ("batch", "positions", "token_ids")

    def __init__(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.batch = batch
