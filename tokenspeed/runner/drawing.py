"""Tokens of a GPU step's rows from their logits: drawn by one operation, inside a recorded step or behind an eager one.

A recorded step draws every row from the model's own logits. Rows whose logits have to be edited (bias, banned tokens,
penalties, the mask of a grammar) are drawn again behind it, by the same one with the same random numbers; from copies,
where more than a mask changes them. So what else a request asks for does not change its text, as far as the edits do
not. Log-probabilities are only gathered. Nothing here waits for the device, except a grammar for the token before
(`grammar_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.kernels.slot_ops import PickedRows, SlotOps, SlotSampling
from tokenspeed.kernels.upload import to_device
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, SteadyRows
from tokenspeed.runner.constraints import Constraints
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.grammar_rows import GrammarRows
from tokenspeed.runner.launched_step import Sampled
from tokenspeed.runner.picked_rows import PickedRoom
from tokenspeed.runner.slot_sampling import SlotParameters
from tokenspeed.runner.trial_steps import EVERYTHING
from tokenspeed.runner.warm_up import GREEDY
from tokenspeed.sampling.chunks import row_chunks
from tokenspeed.sampling.edits import LogitEdits, Positions
from tokenspeed.sampling.logprobs import PendingLogprobs, gather_logprobs


@dataclass(frozen=True, slots=True)
class Landing:
    """What a step has of page-locked memory while it is on the device.

    Fields:
        token_ids: where tokens of n rows arrive, [n] int32.
        done: to be recorded behind the step.
        picked: for the rows that are drawn again; the step's alone.
    """

    token_ids: torch.Tensor
    done: torch.cuda.Event
    picked: PickedRoom


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
        self._grammar_rows = GrammarRows(Constraints(grammars, vocab_size))

    @property
    def sampling(self) -> SlotSampling:
        """For recorded steps."""
        return self._parameters.sampling

    def picked_room(self) -> PickedRoom:
        """Room for one step in flight: every slot may be drawn again."""
        return PickedRoom(len(self._state.token_ids), self._vocab_size, self._device)

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
        rows: Sequence[Row] | SteadyRows,
        slots: Sequence[int],
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        landing: Landing,
    ) -> Sampled:
        """Draw those rows again whose logits are edited, and start the copy of all tokens to the host.

        Args:
            slots: of the n rows.
            token_ids: [n] int32, drawn from `logits` [n or more, V]; corrected in place.
        """
        held = self._grammar_rows.rows(slots)
        errors = self._grammar_rows.catch_up([slots[row] for row in held]) if held else {}
        editable = self._edits.places(slots)
        if held or editable:
            positions = _ends(rows, {*held, *editable})
            edited = self._edits.due(editable, slots, positions)
            if edited:
                self._redraw(edited, slots, positions, token_ids, logits, landing.picked)
            if held:
                others = set(edited)
                only_held = [row for row in held if row not in others]
                self._redraw_masked(only_held, slots, positions, token_ids, logits, landing.picked)
        landing.token_ids.copy_(token_ids, non_blocking=True)
        sampled = Sampled(landing.token_ids, landing.done, errors=errors)
        asked = self._parameters.logprob_rows(slots)
        if asked:
            sampled.logprobs, sampled.logprob_rows = self._logprobs(asked, token_ids, logits), tuple(asked)
        if held:
            self._grammar_rows.sampled(slots, sampled)
        return sampled

    def warm_up(self, dtypes: Iterable[torch.dtype], picked: PickedRoom) -> None:
        """Do for logits of each dtype what neither a recorded step nor one of `warm_up_plans` does: masks, edits,
        log-probabilities. In the scratch slot, which is greedy again afterwards. The device has done with `picked` in
        the end."""
        scratch = len(self._state.token_ids) - 1
        self.admit(self._scratch_admission(scratch, EVERYTHING))
        for dtype in dtypes:
            picked.clear()
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            token_ids = self.draw(logits, [scratch], [1])
            group = picked.take(1, has_masks=True)
            group.name([0], [scratch], [1])
            group.masks[:] = 0
            self._again(logits, *group.send(), token_ids, [scratch])
            self._redraw([0], [scratch], [1], token_ids, logits, picked)
            self._logprobs({0: 1}, token_ids, logits).finish()
        self.admit(self._scratch_admission(scratch, GREEDY))

    def _scratch_admission(self, slot: int, sampling: SamplingParams) -> Admission:
        pages: tuple[list[int], ...] = ([],) * len(self._state.page_tables)
        return Admission(slot, "warm-up", slot, [0], 1, pages, sampling, banned_token_ids=(0,))

    def _redraw(
        self,
        edited: list[int],
        slots: Sequence[int],
        positions: Positions,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        picked: PickedRoom,
    ) -> None:
        """Draw the rows `edited` again, from copies of their logits, into `token_ids` and their slots."""
        masks = self._grammar_rows.masks([slots[row] for row in edited])
        for part in row_chunks(len(edited), logits.shape[1], self._device):
            mine = edited[part]
            group = picked.take(len(mine), has_masks=False)
            group.name(mine, slots, positions)
            rows, _ = group.send()
            copies = logits[rows.places].float()
            my_slots, my_positions = [slots[row] for row in mine], [positions[row] for row in mine]
            self._edits.apply(copies, my_slots, my_positions, masks.part(part) if masks is not None else None)
            self._again(copies, rows, None, token_ids, my_slots)
            self._edits.count(my_slots, token_ids[rows.places])

    def _redraw_masked(
        self,
        held: list[int],
        slots: Sequence[int],
        positions: Positions,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        picked: PickedRoom,
    ) -> None:
        """The same for rows that only their grammars constrain, as far as they do; without copies."""
        mine = [held[place] for place in self._grammar_rows.constrained([slots[row] for row in held])]
        if not mine:
            return
        my_slots = [slots[row] for row in mine]
        group = picked.take(len(mine), has_masks=True)
        group.name(mine, slots, positions)
        self._grammar_rows.fill(my_slots, group.masks)
        self._again(logits, *group.send(), token_ids, my_slots)

    def _again(
        self,
        logits: torch.Tensor,
        rows: PickedRows,
        masks: torch.Tensor | None,
        token_ids: torch.Tensor,
        slots: Sequence[int],
    ) -> None:
        """See `slot_ops.RedrawRows`."""
        filters = self._parameters.filter_any(slots)
        self._ops.redraw_rows(logits, rows, masks, self.sampling, self._state.token_ids, token_ids, filters)

    def _logprobs(self, asked: dict[int, int], token_ids: torch.Tensor, logits: torch.Tensor) -> PendingLogprobs:
        """Under the model's own logits."""
        index = to_device(list(asked), torch.int64, self._device)
        return gather_logprobs(logits[index], token_ids[index].long().clamp(min=0), list(asked.values()))


def _ends(rows: Sequence[Row] | SteadyRows, places: Iterable[int]) -> dict[int, int]:
    """Place -> the position behind the row's tokens. Columns are read, not made into rows."""
    if isinstance(rows, SteadyRows):
        behind = rows.age + 1
        return {place: rows.members.starts[place] + behind for place in places}
    return {place: rows[place].start + rows[place].num_tokens for place in places}
