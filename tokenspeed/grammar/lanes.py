"""Which grammar is compiled next, and for how long it may be tried. No threads, no processes of its own.

What a grammar costs is known only when it is compiled: twenty that take half a minute each, and nobody else's was
compiled for five minutes. So each gets a short turn first, and what is not done by then starts anew behind the others:

    first (0.2 s, or 1 s while nobody waits)  ->  again (1 s)  ->  slow (to the end; so many may wait)

One thread never takes what is slow.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokenspeed.grammar.interface import CompiledGrammar
from tokenspeed.protocol.errors import Overloaded
from tokenspeed.protocol.grammar import GrammarSpec

FIRST_S = 0.2
"""Of a turn, while others wait. Usual schemas take 0.02 to 0.1 s."""

QUICK_S = 1.0
MAX_SLOW = 16
"""Grammars that wait for a long turn."""

RETRY_S = 30  # after which there may be room for a slow one again


@dataclass(slots=True, eq=False)
class Ticket:
    """One grammar on its way.

    Fields:
        num_turns: that were too short for it.
        is_slow: it has had a turn of `QUICK_S`.
        is_wanted: somebody waits for it.
    """

    spec: GrammarSpec
    future: Future[CompiledGrammar] = field(default_factory=Future)
    num_turns: int = 0
    is_slow: bool = False
    is_wanted: bool = True


class Lanes:
    """See the module. Any thread may call.

    Args:
        timeout_s: what one compilation may take; no turn is longer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._first: deque[Ticket] = deque()
        self._again: deque[Ticket] = deque()
        self._slow: deque[Ticket] = deque()
        self._is_closed = False

    def put(self, ticket: Ticket) -> None:
        """A grammar that has had no turn yet."""
        with self._changed:
            self._first.append(ticket)
            self._changed.notify_all()

    def take(self, takes_slow: bool) -> tuple[Ticket, float] | None:
        """Wait for the next one: it, and the seconds that its turn may take. None: closed.

        Args:
            takes_slow: what is slow goes first; else it is left to others.
        """
        with self._changed:
            while not self._is_closed:
                if takes_slow and self._slow:
                    return self._slow.popleft(), self._timeout_s
                if self._first:
                    ticket = self._first.popleft()
                    is_alone = not self._first and not self._again
                    return ticket, min(self._timeout_s, QUICK_S if is_alone else FIRST_S)
                if self._again:
                    return self._again.popleft(), min(self._timeout_s, QUICK_S)
                self._changed.wait()
            return None

    def late(self, ticket: Ticket, turn_s: float) -> None:
        """A turn of so many seconds, less than there are in all, was too short for it.

        Raises:
            Overloaded: as many slow ones as may wait do.
        """
        with self._changed:
            ticket.num_turns += 1
            ticket.is_slow = turn_s >= QUICK_S
            if ticket.is_slow and len(self._slow) >= MAX_SLOW:
                raise Overloaded(
                    f"the grammar takes more than {QUICK_S:g} s to compile, and {MAX_SLOW} such grammars wait already, "
                    "which is the limit; try again later, or make it smaller",
                    RETRY_S,
                )
            (self._slow if ticket.is_slow else self._again).append(ticket)
            self._changed.notify_all()

    def leave(self, ticket: Ticket) -> bool:
        """Nobody wants it any more. True: it has waited for a turn, and does no longer."""
        with self._changed:
            for lane in (self._first, self._again, self._slow):
                if ticket in lane:
                    lane.remove(ticket)
                    return True
        return False

    def close(self) -> list[Ticket]:
        """No more turns; who has waited for one."""
        with self._changed:
            self._is_closed = True
            waiting = [*self._first, *self._again, *self._slow]
            for lane in (self._first, self._again, self._slow):
                lane.clear()
            self._changed.notify_all()
        return waiting
