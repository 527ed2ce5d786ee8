"""Steady decoding: step after step the same sequences, each one token further, without a look at each of them.

Most steps are like the one before. What the scheduler would find in every row is then known in advance: the start is
one more; a page is needed, or full, at steps that can be named beforehand; the first that can end by length is known;
and whether a token ends its sequence is one question to the union of all end tokens. So a step costs a few operations
on columns. Whatever is not of this kind is left to the scheduler's ordinary path, whose results are the same.

The invariant. While a `SteadyDecodes` is in force, it holds all running sequences, in their order, and every plan since
it began has one decode row for each. `Sequence.token_ids`, page tables and prefix index are kept up to date.
`num_computed` and `num_pending` are not: they follow from how many steps have been planned and applied, and `settle`
writes them back. Everybody who reads them, or changes who runs, calls `end` (or `settle`) first: the ordinary `plan`,
`_leave_slot` and `check`.

    step    0 ... age of a page needed ... age of a page full ... last_age: the first sequence gets its last token
            |     planned with the page    applied with a commit  planned here, applied (so ended) by the ordinary path

Owns no rule: what ends a sequence, what a page is and who runs are decided elsewhere. Aborts, endings, admissions,
preemptions, drafts and log-probabilities are not handled here, and should not be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf

from tokenspeed.cache.manager import CacheManager
from tokenspeed.protocol.messages import Continued
from tokenspeed.protocol.step import SteadyResults, SteadyRows, SteadySet, StepResult
from tokenspeed.scheduler.invariants import Planned

_Due = dict[int, list[int]]
"""Age of a step -> places of the rows that need a look then."""


class SteadyDecodes:
    """Sequences that decode together. Make it with `begin`.

    Args:
        planned: the rows of the plan before, one decode for every running sequence.
    """

    def __init__(self, cache: CacheManager, planned: SequenceOf[Planned]) -> None:
        self._cache = cache
        self._sequences = [sequence for sequence, _, _ in planned]
        self._epochs = [epoch for _, epoch, _ in planned]
        self._request_ids, self._indices, self._token_ids = [], [], []
        self._pages_due: _Due = defaultdict(list)
        self._commits_due: _Due = defaultdict(list)
        starts, last_ages = [], []
        for place, sequence in enumerate(self._sequences):  # once a set, but sets may be short: no second look
            start, table = sequence.num_computed, sequence.table
            starts.append(start)
            last_ages.append(sequence.max_len - start - 2)
            self._request_ids.append(sequence.request.request_id)
            self._indices.append(sequence.index)
            self._token_ids.append(sequence.token_ids)
            self._pages_due[max(0, table.capacity - start)].append(place)
            self._commits_due[max(0, table.commit_at - 1 - start)].append(place)
        self._last_age = min(last_ages)
        self._stop_ids = frozenset[int]().union(*{sequence.stop_ids for sequence in self._sequences})
        no_pages: tuple[list[int], ...] = tuple([] for _ in cache.groups)
        self._members = SteadySet(tuple([row.slot for _, _, row in planned]), tuple(starts), no_pages)
        self._num_planned = self._num_applied = 0
        self._num_settled = (0, 0)  # how much of both the sequences know

    @classmethod
    def begin(cls, cache: CacheManager, planned: SequenceOf[Planned]) -> SteadyDecodes | None:
        """For the sequences of the plan before, which are all that run; None when one of them has more to tell than its
        next token, or does not decode on."""
        for sequence, _, _ in planned:
            if (
                not sequence.said_anything
                or sequence.request.parked
                or sequence.sampling.logprobs is not None
                or len(sequence.token_ids) + sequence.num_pending - sequence.num_computed != 1
            ):
                return None
        return cls(cache, planned)

    def plan(self) -> SteadyRows | None:
        """The rows of the next step; None when it is of another kind (nothing has changed then)."""
        age = self._num_planned
        if age > self._last_age:
            return None
        due = self._pages_due.get(age)
        new_pages: dict[int, tuple[list[int], ...]] = {}
        if due is not None:
            if not self._cache.has_pages(len(due) * len(self._cache.groups)):
                return None
            self._take_pages(age, sorted(due), new_pages)
            del self._pages_due[age]
        self._num_planned = age + 1
        return SteadyRows(self._members, age, new_pages)

    def apply(self, rows: SteadyRows, result: StepResult) -> Continued | None:
        """Take in what a step produced: the news; None when a sequence may end or has more to tell (nothing has changed
        then).

        Raises:
            ValueError: the result is not one of these rows (a bug of the runner).
        """
        got = result.rows
        if not isinstance(got, SteadyResults) or rows.age >= self._last_age:
            return None
        token_ids = got.token_ids
        if got.members is not self._members or len(token_ids) != len(self._sequences):
            raise ValueError(f"step {result.step_id}: the result is one of other rows")
        if not self._stop_ids.isdisjoint(token_ids):
            return None
        for known, token_id in zip(self._token_ids, token_ids, strict=True):
            known.append(token_id)
        self._num_applied += 1
        if rows.age in self._commits_due:
            self._commit(rows.age, sorted(self._commits_due.pop(rows.age)))
        return Continued(self._request_ids, self._indices, token_ids)

    def settle(self) -> None:
        """Write back what the sequences do not know of their steps."""
        planned, applied = self._num_settled
        more_computed = self._num_planned - planned
        more_pending = more_computed - (self._num_applied - applied)
        for sequence in self._sequences:
            sequence.num_computed += more_computed
            sequence.num_pending += more_pending
        self._num_settled = self._num_planned, self._num_applied

    def planned(self, rows: SteadyRows) -> list[Planned]:
        """The rows as the ordinary path knows them."""
        return list(zip(self._sequences, self._epochs, rows, strict=True))

    def _take_pages(self, age: int, due: list[int], new_pages: dict[int, tuple[list[int], ...]]) -> None:
        """Pages for the tokens of the rows `due`, of which there are enough."""
        for place in due:
            table, start = self._sequences[place].table, self._members.starts[place]
            if start + age + 1 > table.capacity:
                got = self._cache.reserve(table, start + age + 1)
                assert got is not None, "pages that were there are not"
                new_pages[place] = got
            self._pages_due[table.capacity - start].append(place)

    def _commit(self, age: int, due: list[int]) -> None:
        """The tokens of the rows `due` are computed."""
        for place in due:
            sequence, start = self._sequences[place], self._members.starts[place]
            if start + age + 1 >= sequence.table.commit_at:
                self._cache.commit(sequence.table, sequence.token_ids, start + age + 1)
            self._commits_due[sequence.table.commit_at - 1 - start].append(place)


class SteadyStep:
    """A steady plan in flight.

    Args:
        decodes: whose.
    """

    __slots__ = ("decodes", "rows")

    def __init__(self, decodes: SteadyDecodes, rows: SteadyRows) -> None:
        self.decodes = decodes
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def planned(self) -> list[Planned]:
        """As the ordinary path knows it."""
        return self.decodes.planned(self.rows)
