"""The operations of a device that keeps requests in slots, as types: inputs of recorded steps, and drawing of tokens.

A step's rows name slots; what belongs to a slot (tokens, pages, sampling parameters) is on the device already. So a
recorded step needs a few numbers a row from the host, and its last operation writes what it drew where the next step's
first one reads it. `registry.select_slot_ops` picks an implementation of each.

S slots of L positions, R rows or requests, T tokens, G cache groups, P pages a request, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What a device keeps of S slots in G cache groups.

    Fields:
        token_ids: [S, L] int64. page_tables: [G, S, P] int32.
        windows: [G] int32, tokens that a query sees in the group; at least L where it sees all.
    """

    token_ids: torch.Tensor
    page_tables: torch.Tensor
    windows: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """Static buffers of a graph for T tokens of R requests in G cache groups; a decode step has T = R.

    Fields:
        token_ids, positions: [T] int64. flat_slots: [G, T] int64. Padding tokens go to the scratch slot.
        query_start: [R + 1] int32, fixed in a decode step. seq_lens: [R] int32, this step's tokens included.
        page_tables: [G, R, P] int32.
        wanted: [R] int64, each request's last token among the T; None in a decode step.
        next_positions: [R] int64, of the token after it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    flat_slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    page_tables: torch.Tensor
    wanted: torch.Tensor | None
    next_positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling parameters by slot, on the device: temperature (0 = greedy), top_p, min_p [S] float32; top_k [S] int32
    (0 = off); seed [S] int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Some rows of a step, on the device.

    Fields:
        places: [n] int64, among the step's rows. slots: [n] int32. positions: [n] int64, see `SampleRows`.
    """

    places: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


class DecodeInputs(Protocol):
    def __call__(self, rows: torch.Tensor, tables: SlotTables, out: RecordedInputs) -> None:
        """Fill `out` for decode rows, except `query_start`, after noting the pages that they bring in `tables`.

        Page numbers come from the window of the row's token on; those before are left as they were.

        Args:
            rows: [2 + G, R] int32: slots, starts (the position of each row's one token), then for each cache group the
                page of that token when it is new, else -1. Rows with a new page are of different slots.
        """
        ...


class PrefillInputs(Protocol):
    def __call__(self, rows: torch.Tensor, tables: SlotTables, scratch_slot: int, out: RecordedInputs) -> None:
        """Fill `out` for prompt rows. Requests beyond the step's own end where the last one ends: they have no tokens.

        Args:
            rows: [>= 3, R] int32: slots, starts (position of each row's first token), ends (its tokens' end among
                the T).
            scratch_slot: whose position 0 padding tokens take.
        """
        ...


class SampleRows(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        sampling: SlotSampling,
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Draw one token a row and append it to its slot.

        The token is argmax_v (l[v] / T + g[v]) over the tokens v that stay, the first where several are equal. Noise
        (Gumbel 1954) is g = -log(-log(u)), u = max(uniform, 1e-10) of counter v under the key seed + position *
        0x1E3779B97F4A7C15 (modulo 2**64) by Philox 4x32-10 (Salmon et al. 2011), so a row depends on nobody else.
        Greedy: g = 0, T = 1. What stays is at or above one threshold, ties included, the largest of: the k-th largest
        logit; max + T log(min_p); the largest t whose tokens at or above it weigh top_p of what the other two leave.

        Args:
            logits: [R, V] float32, float16 or bfloat16, contiguous.
            slots: [R] int32. positions: [R] int64, where the sampled token goes in its slot.
            token_ids: [S, L] int64; written at [slot, position], 0 where a row failed.
        Returns:
            [R] int32 token ids, -1 where the logits were unusable: with NaN, or without a finite maximum.
        """
        ...


class RedrawRows(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        rows: PickedRows,
        masks: torch.Tensor | None,
        sampling: SlotSampling,
        token_ids: torch.Tensor,
        drawn: torch.Tensor,
        filters: bool,
    ) -> None:
        """Draw some rows of a step again, by the same numbers as `SampleRows`, which have drawn all of them.

        A row that has failed there stays as it is: a mask may hide what is wrong with its logits.

        Args:
            logits: as in `SampleRows`. With masks the step's, [R, V]; else those of `rows` alone, [n, V], edited.
            masks: [n, ceil(V / 32)] int32, bit v % 32 of word v // 32 allows token v; what is not allowed counts as
                -inf. Bits beyond V mean nothing.
            token_ids: [S, L] int64; written as in `SampleRows`.
            drawn: [R] int32, what `SampleRows` returned for the step; corrected at the rows' places.
            filters: False: no row has a temperature together with top_k, top_p or min_p, which saves launches.
        """
        ...


@dataclass(frozen=True, slots=True)
class SlotOps:
    """The chosen implementation of each."""

    decode_inputs: DecodeInputs
    prefill_inputs: PrefillInputs
    sample_rows: SampleRows
    redraw_rows: RedrawRows
