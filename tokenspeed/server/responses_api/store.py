"""Finished responses, so that a conversation goes on by `previous_response_id`. In memory, bounded in number and bytes.

A response keeps only its own items and points to the one before it, so a conversation costs what it says once. The one
before stays in memory as long as something points to it, and counts as long, even when it can no longer be asked for:

    index   r1 <- r2 <- r4          r2 deleted: r4 still knows its text; r1 can be asked for, r2 not
               <- r3

When a bound is passed, what was used least recently leaves the index first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from tokenspeed.server.responses_api.items import Item
from tokenspeed.server.responses_api.response import ResponseObject

MAX_STORED_RESPONSES = 10_000
MAX_STORED_BYTES = 256 << 20


@dataclass(eq=False, slots=True)
class StoredResponse:
    """One response.

    Fields:
        response: as it was answered.
        input_items: of its own request, each with an id.
        previous: the response it goes on from.
        num_bytes: what it counts: the size of response and input items as JSON.
        num_followers: responses in memory that point to it.
    """

    response: ResponseObject
    input_items: tuple[Item, ...]
    previous: StoredResponse | None
    num_bytes: int = 0
    num_followers: int = 0
    is_listed: bool = False

    def turns(self) -> list[StoredResponse]:
        """The responses before this one and this one, oldest first."""
        turns: list[StoredResponse] = []
        node: StoredResponse | None = self
        while node is not None:
            turns.append(node)
            node = node.previous
        return turns[::-1]

    def conversation(self) -> list[Item]:
        """All items up to and with this response's output, oldest first."""
        return [item for turn in self.turns() for item in (*turn.input_items, *turn.response.output)]


class ResponseStore:
    """The responses of one server.

    Args:
        max_responses, max_bytes: bounds over everything in memory.
    """

    def __init__(self, max_responses: int = MAX_STORED_RESPONSES, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._index: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self.num_held = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """How many can be asked for."""
        return len(self._index)

    def get(self, response_id: str) -> StoredResponse | None:
        """The response of this id, or None. Counts as a use."""
        found = self._index.get(response_id)
        if found is not None:
            self._index.move_to_end(response_id)
        return found

    def put(self, response: ResponseObject, input_items: tuple[Item, ...], previous: StoredResponse | None) -> bool:
        """Keep a finished response; others leave for it when a bound is passed.

        Args:
            previous: may have left the index meanwhile.
        Returns:
            False when the conversation alone would pass a bound; then nothing has changed.
        """
        num_bytes = len(msgspec.json.encode(response)) + len(msgspec.json.encode(input_items))
        node = StoredResponse(response, input_items, previous, num_bytes, is_listed=True)
        turns = node.turns()
        if len(turns) > self._max_responses or sum(turn.num_bytes for turn in turns) > self._max_bytes:
            return False
        self._hold(node)
        self._index[response.id] = node
        while self._index and (self.num_held > self._max_responses or self.num_bytes > self._max_bytes):
            self._unlist(next(iter(self._index)))
        return True

    def delete(self, response_id: str) -> bool:
        """Forget a response; False when there is none of this id."""
        if response_id not in self._index:
            return False
        self._unlist(response_id)
        return True

    def _hold(self, node: StoredResponse) -> None:
        """Count a node; and those before it again, when they had left memory while this one was generated."""
        while True:
            self.num_held += 1
            self.num_bytes += node.num_bytes
            before = node.previous
            if before is None:
                return
            before.num_followers += 1
            if before.is_listed or before.num_followers > 1:
                return
            node = before

    def _unlist(self, response_id: str) -> None:
        node: StoredResponse | None = self._index.pop(response_id)
        assert node is not None
        node.is_listed = False
        while node is not None and not node.is_listed and node.num_followers == 0:
            self.num_held -= 1
            self.num_bytes -= node.num_bytes
            node = node.previous
            if node is not None:
                node.num_followers -= 1
