"""Tokens of a GPU step's rows from their logits: drawn by one operation, inside a recorded step or behind an eager one.

A recorded step draws every row from the model's own logits. Rows whose logits have to be edited (bias, banned tokens,
penalties, the mask of a grammar) are drawn again behind it, from copies, by the same one with the same random
numbers. So what else a request asks for does not change its text, as far as the edits do not. Log-probabilities are
only gathered. Nothing here waits for the device, except a grammar for the token before (`grammar_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.slot_ops import SlotOps, SlotSampling
from tokenspeed.kernels.upload import send, to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row
from tokenspeed.runner.constraints import Constraints
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.grammar_rows import GrammarRows
from tokenspeed.runner.launched_step import Sampled
from tokenspeed.runner.slot_sampling import SlotParameters
from tokenspeed.runner.trial_steps import EVERYTHING
from tokenspeed.runner.warm_up import GREEDY
from tokenspeed.sampling.chunks import row_chunks
from tokenspeed.sampling.edits import LogitEdits
from tokenspeed.sampling.logprobs import PendingLogprobs, gather_logprobs


class Drawing:
    """What every slot of `state` asks for.

    Args:
        state: drawn tokens are appended to its `token_ids`; its last slot is scratch.
    """

    def __init__(self, state: DeviceState, ops: SlotOps, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._state = state
        self._ops = ops
        self._device = state.device
        self._vocab_size = vocab_size
        self._parameters = SlotParameters(len(state.token_ids), state.device)
        self._edits = LogitEdits(vocab_size, state.device)
        self._grammar_rows = GrammarRows(Constraints(grammars, vocab_size), state.device)

    @property
    def sampling(self) -> SlotSampling:
        """For recorded steps."""
        return self._parameters.sampling

    def admit(self, admission: Admission) -> None:
        """A sequence enters a slot; whatever the slot held is forgotten."""
        self._parameters.admit(admission)
        self._edits.admit(admission)
        self._grammar_rows.admit(admission)

    def draw(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Draw from logits [n, V] as they are, into `positions` of `slots`; [n] int32, -1 where they are unusable."""
        where = to_device(slots, torch.int32, self._device)
        places = to_device(positions, torch.int64, self._device)
        return self._ops.sample_rows(logits, where, places, self.sampling, self._state.token_ids)

    def finish(
        self,
        rows: Sequence[Row],
        slots: Sequence[int],
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        host: torch.Tensor,
    ) -> Sampled:
        """Draw those rows again whose logits are edited, and start the copy of all tokens to the host.

        Args:
            slots: of the n rows.
            token_ids: [n] int32, drawn from `logits` [n or more, V]; corrected in place.
            host: pinned, [n] int32.
        """
        held = self._grammar_rows.rows(slots)
        errors = self._grammar_rows.catch_up([slots[row] for row in held]) if held else {}
        if held or not self._edits.are_none:
            positions = [row.start + row.num_tokens for row in rows]
            edited = self._edits.rows(slots, positions)
            if edited:
                self._redraw(edited, slots, positions, token_ids, logits)
            if held:
                only_held = [row for row in held if row not in edited]
                self._redraw_masked(only_held, slots, positions, token_ids, logits)
                self._grammar_rows.sampled(slots, token_ids)
        host.copy_(token_ids, non_blocking=True)
        asked = self._parameters.logprob_rows(slots)
        if not asked:
            return Sampled(host, errors=errors)
        return Sampled(host, self._logprobs(asked, token_ids, logits), tuple(asked), errors)

    def warm_up(self, dtypes: Iterable[torch.dtype]) -> None:
        """Do for logits of each dtype what neither a recorded step nor one of `warm_up_plans` does: masks, edits,
        log-probabilities. In the scratch slot, which is greedy again afterwards."""
        scratch = len(self._state.token_ids) - 1
        self.admit(self._scratch_admission(scratch, EVERYTHING))
        for dtype in dtypes:
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            words = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32, device=self._device)
            self.draw(self._ops.masked_rows(logits, to_device([0], torch.int64, self._device), words), [scratch], [1])
            token_ids = self.draw(logits, [scratch], [1])
            self._redraw([0], [scratch], [1], token_ids, logits)
            self._logprobs({0: 1}, token_ids, logits).finish()
        self.admit(self._scratch_admission(scratch, GREEDY))

    def _scratch_admission(self, slot: int, sampling: SamplingParams) -> Admission:
        pages: tuple[list[int], ...] = ([],) * len(self._state.page_tables)
        return Admission(slot, "warm-up", slot, [0], 1, pages, sampling, banned_token_ids=(0,))

    def _redraw(
        self,
        edited: list[int],
        slots: Sequence[int],
        positions: list[int],
        token_ids: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """Draw the rows `edited` again, from copies of their logits, into `token_ids` and their slots."""
        masks = self._grammar_rows.masks([slots[row] for row in edited])
        for part in row_chunks(len(edited), logits.shape[1], self._device):
            mine = edited[part]
            my_slots, my_positions = [slots[row] for row in mine], [positions[row] for row in mine]
            index = to_device(mine, torch.int64, self._device)
            copies = logits[index].float()
            self._edits.apply(copies, my_slots, my_positions, masks.part(part) if masks is not None else None)
            self._draw_into(token_ids, index, copies, my_slots, my_positions)
            self._edits.count(my_slots, token_ids[index])

    def _redraw_masked(
        self, held: list[int], slots: Sequence[int], positions: list[int], token_ids: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """The same for rows that only their grammars constrain, as far as they do."""
        masks = self._grammar_rows.masks([slots[row] for row in held])
        if masks is None:
            return
        mine = [held[place] for place in masks.rows]
        index = to_device(mine, torch.int64, self._device)
        allowed = self._ops.masked_rows(logits, index, send(torch.from_numpy(masks.words), self._device))
        self._draw_into(token_ids, index, allowed, [slots[row] for row in mine], [positions[row] for row in mine])

    def _draw_into(
        self, token_ids: torch.Tensor, index: torch.Tensor, logits: torch.Tensor, slots: list[int], positions: list[int]
    ) -> None:
        """Rows whose own logits are unusable (a mask may hide that) stay so."""
        drawn = self.draw(logits, slots, positions)
        token_ids.index_copy_(0, index, torch.where(token_ids[index] < 0, -1, drawn))

    def _logprobs(self, asked: dict[int, int], token_ids: torch.Tensor, logits: torch.Tensor) -> PendingLogprobs:
        """Under the model's own logits."""
        index = to_device(list(asked), torch.int64, self._device)
        return gather_logprobs(logits[index], token_ids[index].long().clamp(min=0), list(asked.values()))
