"""What must hold between any two operations of the scheduler. Reads its state, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from tokenspeed.protocol.step import Row
from tokenspeed.scheduler.queue import OrderedQueue
from tokenspeed.scheduler.request import Request, Sequence, State

Planned = tuple[Sequence, int, Row]  # a sequence, its epoch when planned, its row


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's state by reference: `in_flight` are the rows of all plans without result."""

    requests: Collection[Request]
    running: OrderedQueue
    waiting: OrderedQueue
    num_parked: int
    free_slots: list[int]
    max_num_seqs: int
    in_flight: list[Planned]


def check(now: Snapshot) -> None:
    """Raise AssertionError with the invariant that is broken."""
    live = [sequence for request in now.requests for sequence in request.sequences.values()]
    _check_places(now, live)
    pending = Counter(id(sequence) for sequence, _, row in now.in_flight if row.samples)
    for sequence in live:
        assert sequence.num_pending == pending[id(sequence)], "pending tokens differ from the rows in flight"
        assert sequence.num_computed <= sequence.table.capacity, "tokens are computed outside the pages"
        assert sequence.num_computed <= len(sequence.token_ids) + sequence.num_pending, "unknown tokens are computed"
        assert len(sequence.token_ids) < sequence.max_len, "a sequence outlived its length"
        if sequence.state is not State.RUNNING:
            assert not sequence.table.capacity, "a sequence that does not run holds pages"
    for request in now.requests:
        parked = sorted(i for i, sequence in request.sequences.items() if sequence.state is State.PARKED)
        assert request.sequences, "a request without sequences is registered"
        assert sorted(request.parked) == parked, "parked indices differ from the states"
        assert len(parked) < len(request.sequences), "nobody computes the prompt that the parked wait for"


def _check_places(now: Snapshot, live: list[Sequence]) -> None:
    """Every live sequence is in the one place its state says, every slot has one owner, queues are in order."""
    places = {state: {id(sequence) for sequence in live if sequence.state is state} for state in State}
    assert not places[State.FINISHED], "a finished sequence is still registered"
    assert places[State.RUNNING] == {id(s) for s in now.running}, "the running queue differs from the states"
    assert places[State.WAITING] == {id(s) for s in now.waiting}, "the waiting queue differs from the states"
    assert len(places[State.PARKED]) == now.num_parked, "parked sequences are miscounted"
    for queue in (now.running, now.waiting):
        assert all(a.key < b.key for a, b in pairwise(queue)), "a queue is out of order"
    slots = sorted([sequence.slot for sequence in now.running] + now.free_slots)
    assert slots == list(range(now.max_num_seqs)), "a slot is lost or given twice"
