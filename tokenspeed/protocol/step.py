"""StepPlan and StepResult: where scheduler and runner meet.

The scheduler decides, the runner obeys. A plan carries only what changed since the plan before it; the runner keeps
every request's state (token ids, length, page table, sampling state) in a fixed *slot*. The id of a token that is
still being sampled never appears in a plan: the runner appends it to the slot itself, so plan N+1 can be made and
sent while step N runs. Plans are executed in the order they are made; a page or slot given up in plan N may be
handed out again in plan N+1 because of that order.

Positions of one slot, half-open:

    [0, start)                      already computed: their keys and values are in the pages
    [start, start + num_tokens)     this step's tokens (prompt tokens, or the last sampled token, then drafts)
    start + num_tokens              the token this row samples, when `samples`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

import msgspec

from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot (first time, or again after preemption). Replaces whatever the slot held.

    Fields:
        slot: index in [0, max_num_seqs).
        request_id, index: whose sequence it is (`index` in [0, n)).
        token_ids: every token known now: prompt, then output sampled before a preemption. Positions [0, len).
        prompt_len: how many of them are prompt. Penalties tell prompt from output by it.
        pages: pages given so far, one list a cache group, in position order (prefix hits first). -1 where a sliding
            group has no page because no query of the slot will ever see those tokens.
        sampling: seed is always set here: the scheduler has drawn it, and has added `index` for n > 1.
        banned_token_ids: ids whose logit is -inf while fewer than `sampling.min_tokens` output tokens exist
            (the model's end-of-sequence ids, unless ignored, and stop_token_ids).
        grammar: what the output has to obey, or None. Compiled before the request was admitted.
    """

    slot: int
    request_id: str
    index: int
    token_ids: list[int]
    prompt_len: int
    pages: tuple[list[int], ...]
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One slot's share of a step. A Struct because one is built a row a step: 0.09 us, 0.76 us as a frozen dataclass.
    Never part of a cycle, so the collector need not look at it.

    Fields:
        slot: the slot.
        start: position of the row's first token = tokens whose keys and values already exist.
        num_tokens: tokens to compute, drafts included, >= 1.
        new_pages: pages to append to the slot's page table before the step, one list a cache group. Read only:
            rows share the empty lists.
        samples: True when the row ends at the last known token, so a next token is sampled.
        draft_token_ids: proposed tokens to verify; the last `len` of the row's tokens. Empty without speculation.
        is_decode: the row computes only a token that was sampled (num_tokens == 1 + drafts, all after the prompt).
    """

    slot: int
    start: int
    num_tokens: int
    new_pages: tuple[list[int], ...]
    samples: bool
    is_decode: bool
    draft_token_ids: tuple[int, ...] = ()


class SteadySet(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Slots that decode together, step after step: what their steps have in common. Known by its identity.

    Fields:
        slots: theirs, in the order of the rows.
        starts: where the rows of the set's first step start.
        no_pages: `Row.new_pages` of a row that brings none.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    no_pages: tuple[list[int], ...]


class SteadyRows:
    """The rows of a step in which a `SteadySet` decodes one token further, and nothing else happens: as columns, so
    that nobody has to touch each of them. Reads like a list of `Row`; they are made when somebody looks.

    Fields:
        members: whose rows.
        age: how many steps the set has had before: row i starts at `members.starts[i] + age`. Counts up by one a plan.
        new_pages: place of a row that brings pages -> its `Row.new_pages`; mostly empty.
    """

    __slots__ = ("_rows", "age", "members", "new_pages")

    def __init__(self, members: SteadySet, age: int, new_pages: dict[int, tuple[list[int], ...]]) -> None:
        self.members = members
        self.age = age
        self.new_pages = new_pages
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return len(self.members.slots)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._made())

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        return self._made()[place]

    def _made(self) -> list[Row]:
        if self._rows is None:
            members, age = self.members, self.age
            pages = [self.new_pages.get(place, members.no_pages) for place in range(len(members.slots))]
            self._rows = [
                Row(slot, start + age, 1, new_pages, True, True)
                for slot, start, new_pages in zip(members.slots, members.starts, pages, strict=True)
            ]
        return self._rows


class StepPlan(msgspec.Struct, frozen=True):
    """One step. The runner applies `admissions`, then runs `rows` (decode rows first), in this order.

    Fields:
        step_id: counts up by one a plan.
        admissions: slots to fill before the step.
        rows: at most one a slot; decode rows stand before the others.
        num_tokens: sum over rows = the part of the token budget spent, drafts included.
    """

    step_id: int
    admissions: list[Admission]
    rows: list[Row] | SteadyRows
    num_tokens: int

    @property
    def num_decodes(self) -> int:
        """How many decode rows there are; as a rule all."""
        rows = self.rows
        if isinstance(rows, SteadyRows):
            return len(rows)
        return len(rows) if rows and rows[-1].is_decode else sum(row.is_decode for row in rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: natural log of the softmax of the model's own logits, before logit_bias,
    penalties, temperature and filters (what vLLM reports by default).

    Fields:
        token_id, logprob, rank: the token that stands there; rank 1 = the most likely.
        top_ids, top_logprobs: the k most likely, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What one row of the plan produced, in the plan's row order. A Struct for the same reason as `Row`.

    Fields:
        slot: the row's slot.
        token_ids: sampled tokens: empty when the row does not sample, one without speculation, more when drafts
            were accepted (the accepted drafts, then the bonus token).
        logprobs: one an entry of `token_ids` when the request asked, else empty.
        prompt_logprobs: for prompt positions (start, start + num_tokens] of this row that are prompt tokens, i.e.
            the logprob of the token *after* each computed position; empty unless asked.
        error: None, or why this request alone fails (NaN logits). Its tokens are then empty. A plan made meanwhile may
            hold one more row for the slot; whatever that row computes is dropped, it only must not fail the step.
        error_code: what kind of error, where the request itself is at fault (see `SequenceOutput`); else None.
    """

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    error: str | None = None
    error_code: str | None = None


class SteadyResults(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What `SteadyRows` produced when there is nothing else to say: one token each. Reads like a list of `RowResult`.

    Fields:
        members: as in the plan.
        token_ids: one a row, in the order of the rows.
    """

    members: SteadySet
    token_ids: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[RowResult]:
        return (RowResult(slot, [token_id]) for slot, token_id in zip(self.members.slots, self.token_ids, strict=True))


def results_of(rows: list[Row] | SteadyRows, results: list[RowResult]) -> list[RowResult] | SteadyResults:
    """Results of rows, as columns where these say all."""
    if not isinstance(rows, SteadyRows):
        return results
    for got in results:
        if len(got.token_ids) != 1 or got.logprobs or got.prompt_logprobs or got.error is not None:
            return results
    return SteadyResults(rows.members, [got.token_ids[0] for got in results])


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of the plan with the same step_id; `rows` matches the plan's rows one to one."""

    step_id: int
    rows: list[RowResult] | SteadyResults
