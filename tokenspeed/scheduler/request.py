"""A request and its sequences inside the scheduler: what is known, what is computed, what is on its way.

Owns state and the rule that says when a sequence has ended. Decides nothing about steps or memory.

Tokens of one sequence, half-open (`num_pending` is 0 or 1 with a loop overlapped by one step):

    [0, num_computed)                          planned: their keys and values exist once the planned steps have run
    [0, len(token_ids))                        known to the host
    [len(token_ids), + num_pending)            sampled by steps in flight; the runner knows them first
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from tokenspeed.cache.manager import CacheManager, PageTable
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import TokenLogprobs
from tokenspeed.scheduler.policy import OrderKey, Policy, order_key

NO_SLOT = -1


class State(Enum):
    """Where a sequence is. PARKED: it waits for its request's first sequence to compute the prompt they share."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n sequences.

    Fields:
        request: whose; `index` in [0, n).
        key: the place in the order of admission; the largest running key is preempted first.
        sampling: with this sequence's own seed; `prompt_logprobs` only on index 0, until delivered.
        token_ids: prompt, then output that has been applied.
        max_len: the sequence ends with "length" at this many tokens.
        stop_ids: token ids that end it once min_tokens output tokens stand before them.
        table: its pages.
        epoch: counts preemptions, so that a late result cannot touch the state of the next admission.
    """

    request: Request
    index: int
    key: OrderKey
    sampling: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int
    stop_ids: frozenset[int]
    table: PageTable
    state: State = State.WAITING
    slot: int = NO_SLOT
    num_computed: int = 0
    num_pending: int = 0
    epoch: int = 0
    said_anything: bool = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while prompt logprobs are still owed, so that the prompt has to be computed, not found."""
        return self.sampling.prompt_logprobs is not None

    def may_stop_at(self, position: int) -> bool:
        """True when a stop token at `position` ends the sequence."""
        return position - self.prompt_len >= self.sampling.min_tokens


@dataclass(slots=True, eq=False)
class Request:
    """What the sequences of one request share.

    Fields:
        private_root: root of the pages they share when nothing else may (prefix caching off, n > 1), else None.
        sequences: those that have not ended, by index.
        parked: indices waiting for the prompt.
        num_cached_tokens: prompt tokens its first sequence found in the prefix cache at its first admission; what
            later sequences find because their sibling has computed it is not counted. None before admission.
        prompt_logprobs: entry i belongs to prompt position i + 1; grows chunk by chunk.
    """

    request_id: str
    private_root: bytes | None
    banned_token_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    sequences: dict[int, Sequence] = field(default_factory=dict)
    parked: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def begin(
        self,
        request: AddRequest,
        tables: list[PageTable],
        *,
        policy: Policy,
        arrival: int,
        seed: int,
        eos_token_ids: tuple[int, ...],
        max_len: int,
    ) -> None:
        """Make the n sequences, one a page table. `max_len`: tokens that context and memory allow."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(prompt) + sampling.max_tokens)
        stop_ids = stop_ids_of(sampling, eos_token_ids)
        self.banned_token_ids = stop_ids if sampling.min_tokens else ()
        self.grammar = request.grammar
        for index, table in enumerate(tables):
            self.sequences[index] = Sequence(
                request=self,
                index=index,
                key=order_key(policy, request.priority, arrival, index),
                sampling=sequence_sampling(sampling, seed, index),
                token_ids=list(prompt),
                prompt_len=len(prompt),
                max_len=max_len,
                stop_ids=frozenset(stop_ids),
                table=table,
            )

    def collect_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Store the entries of a row that began at `start`. A prompt computed again after a preemption writes over what
        was collected before, so nothing is doubled."""
        self.prompt_logprobs[start : start + len(entries)] = entries


def open_tables(cache: CacheManager, request: AddRequest) -> tuple[bytes | None, list[PageTable]]:
    """The private root of a request whose sequences share pages although nothing else does, else None; a page table for
    each sequence."""
    count = request.sampling.n
    if count == 1 or cache.enable_prefix_caching:
        return None, [cache.open(request.cache_salt) for _ in range(count)]
    private_root = cache.open_private_root()
    return private_root, [cache.open_private(private_root) for _ in range(count)]


def sequence_sampling(sampling: SamplingParams, seed: int, index: int) -> SamplingParams:
    """Sampling parameters of sequence `index`: seed + index (wrapped to 64 signed bits); prompt logprobs on index 0."""
    wrapped = (seed + index + 2**63) % 2**64 - 2**63
    prompt_logprobs = sampling.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(sampling, seed=wrapped, prompt_logprobs=prompt_logprobs)


def stop_ids_of(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end a sequence: the model's, unless ignored, then the request's own; each once."""
    eos = () if sampling.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))


def why_refused(request: AddRequest, max_model_len: int, capacity_tokens: int) -> str | None:
    """Why the request can never run here, for the user; None when it can. The client has checked before; this is what
    keeps one bad message from stopping the queue."""
    prompt_len = len(request.prompt_token_ids)
    if prompt_len < 1:
        return "the prompt is empty; it needs at least 1 token"
    if prompt_len >= max_model_len:
        return f"the prompt has {prompt_len} tokens, the context of {max_model_len} leaves room for {max_model_len - 1}"
    if prompt_len >= capacity_tokens:
        return (
            f"the prompt has {prompt_len} tokens, the KV cache holds {capacity_tokens} and one is needed for output; "
            "shorten the prompt or start the server with more KV cache memory"
        )
    return None
