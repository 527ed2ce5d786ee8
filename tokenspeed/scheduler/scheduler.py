"""The scheduler: spends one token budget a step over requests, and turns step results into news for the client.

Owns the lifecycle of every sequence (waiting, parked, running, finished), the slots and the order of the plans. Asks
`cache/` for pages. Never imports torch, never talks to a channel, never looks at text. May be added here: rules about
which rows a step gets. Not here: page accounting (`cache/`), how a request is taken apart (`request.py`), what a result
means for a sequence (`outcome.py`), who goes first (`policy.py`).

There is no prefill or decode phase: a sequence has `num_computed` tokens and catches up with those it knows. A plan
takes, while budget is left, (1) sequences that only need their newest token computed, (2) running sequences behind by
more, in chunks, (3) waiting sequences, strictly in order. (1) comes first, so no prompt, however long, delays a decode
by more than its share of one budget.

The loop may be overlapped by one step: `plan()` for step N + 1 is called before `apply()` of step N. The sequence is
then moved on without knowing its newest token (`num_pending`). What turns out late:

* it has ended: its row in flight is dropped when that arrives; pages and slot may be handed out by the next plan, which
  the runner executes after the row in flight.
* it was preempted with a token on its way: the token is kept when it arrives, and only then may it be admitted again.

Memory: an admission reserves what all known tokens will keep, and of sliding-window layers, which give back what they
take, the pages of its first chunk. So decodes ask for more, and with sliding windows chunks do. When none are left for
a decode the sequence with the largest key (the youngest; under `priority` the least important) is preempted: pages
released, back in the queue at its place, computed again later. The first in order is never preempted, and every
sequence ends at `max_len` <= what the pool holds for one alone, so it ends; then the next is first. Admission leaves
one page for each running sequence, so that what has just been preempted does not come back to be thrown out again.

A chunk without pages waits and preempts nobody: its own chunk in flight will leave the window, decodes will end.
Meanwhile nobody enters. Since a plan admits only with budget that the chunks before have left, at most one running
sequence is in the middle of its tokens; all others decode, so they end, and the one that waits is alone at last.
"""

from __future__ import annotations

import random

from tokenspeed.cache.manager import CacheManager
from tokenspeed.protocol.messages import AddRequest, EngineStats, FinishReason, News, SequenceOutput
from tokenspeed.protocol.step import Row, RowResult, StepPlan, StepResult
from tokenspeed.scheduler import invariants
from tokenspeed.scheduler.counters import Counters
from tokenspeed.scheduler.drafter import Drafter, proposed
from tokenspeed.scheduler.in_flight import InFlight
from tokenspeed.scheduler.outcome import continued, news, refusals, take_tokens
from tokenspeed.scheduler.outline import Outline, admission_of
from tokenspeed.scheduler.policy import Policy
from tokenspeed.scheduler.queue import OrderedQueue
from tokenspeed.scheduler.request import NO_SLOT, Request, Sequence, State, open_tables, why_refused
from tokenspeed.scheduler.steady import SteadyDecodes, SteadyStep


class Scheduler:
    """See the module. One thread only.

    Args:
        cache: pages for the sequences; this scheduler is its only user.
        eos_token_ids: the model's end-of-sequence ids.
        max_num_seqs: slots, so sequences running at once.
        max_num_batched_tokens: the token budget of a step. Smaller than the running decodes is allowed: the last in
            order then wait their turn.
        max_model_len: tokens of a sequence at most, prompt and output. The pool's capacity limits it further.
        policy: `fifo` or `priority`.
        seed: of the generator that draws seeds for requests without one.
        drafter: proposes draft tokens, or None. With one, a sequence is planned only when its last result is applied.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(
        self,
        *,
        cache: CacheManager,
        eos_token_ids: tuple[int, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = "fifo",
        seed: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self._cache = cache
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._policy = policy
        self._seeds = random.Random(seed)
        self._drafter = drafter
        self._requests: dict[str, Request] = {}
        self._waiting = OrderedQueue()
        self._running = OrderedQueue()
        self._num_parked = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._in_flight = InFlight()
        self._steady: SteadyDecodes | None = None
        self._all_decode: list[invariants.Planned] | None = None  # the plan before, if it decoded for all who run
        self._num_arrivals = 0
        # Shared by all rows that get no page, so that a steady decode row allocates nothing; the runner only reads it.
        self._no_pages: tuple[list[int], ...] = tuple([] for _ in cache.groups)
        self._counters = Counters()

    # -- requests in ---------------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> list[SequenceOutput]:
        """Take a request; its n sequences start waiting.

        Returns:
            Empty, or one terminal "error" output a sequence for a request that can never run here.

        Raises:
            ValueError: a live request has this id (a bug of the client; nothing has changed).
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already live")
        sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
        max_len = min(self._max_model_len, self._cache.capacity_tokens)
        reason = why_refused(request, self._max_model_len, self._cache.capacity_tokens)
        if reason is not None:
            return refusals(request, reason)
        private_root, tables = open_tables(self._cache, request)
        live = Request(request.request_id, private_root)
        live.begin(
            request,
            tables,
            policy=self._policy,
            arrival=self._num_arrivals,
            seed=sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63),
            eos_token_ids=self._eos_token_ids,
            max_len=max_len,
        )
        self._num_arrivals += 1
        self._requests[request.request_id] = live
        shares = self._shared_prompt_len(prompt_len) > 0
        for index, sequence in live.sequences.items():
            if index and shares:
                sequence.state = State.PARKED
                live.parked.append(index)
                self._num_parked += 1
            else:
                self._waiting.add(sequence)
        return []

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        """End a request now, or only its sequence `index`; the pages are free for the next plan. What is not live (any
        more) gives nothing."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        sequences = [sequence for sequence in request.sequences.values() if index is None or sequence.index == index]
        return [self._finish(sequence, "abort") for sequence in sequences]

    def abort_all(self, finish_reason: FinishReason = "abort", error: str | None = None) -> list[SequenceOutput]:
        """End every live sequence, with `error` as the message for the user when the reason is "error"."""
        outputs = []
        for request in list(self._requests.values()):
            for sequence in list(request.sequences.values()):
                outputs.append(self._finish(sequence, finish_reason, error=error))
        return outputs

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now (idle, or everything waits for results in flight)."""
        return self._plan_steady() or self._plan_all()

    def _plan_steady(self) -> StepPlan | None:
        """The step after one that decoded for all who run, when it does the same: see `steady`. Whoever waits is asked
        as in any other step, behind the decodes; if one enters, these are rows like others."""
        if self._all_decode is not None:
            self._steady, self._all_decode = SteadyDecodes.begin(self._cache, self._all_decode), None
        rows = None if self._steady is None else self._steady.plan()
        if self._steady is None or rows is None:
            return None
        if self._free_slots and len(self._waiting):
            outline = Outline(self._budget)
            outline.budget -= len(rows)
            self._admit(outline)
            if outline.admissions:
                outline.decodes[:0] = self._steady.planned(rows)
                self._end_steady()
                return self._send(outline)
        self._counters.step_tokens.append(len(rows))
        return self._in_flight.send(SteadyStep(self._steady, rows), [], rows, len(rows))

    def _plan_all(self) -> StepPlan | None:
        """The next step, with a look at every sequence."""
        self._end_steady()
        outline = Outline(self._budget)
        num_preempted = self._counters.num_preemptions
        for sequence in self._plan_decodes(outline):
            if not outline.budget:
                break
            self._plan_chunk(outline, sequence)
        # The memory just taken back, or waited for, is for those who run.
        if self._counters.num_preemptions == num_preempted and not outline.is_blocked:
            self._admit(outline)
        return None if outline.is_empty else self._send(outline)

    def _send(self, outline: Outline) -> StepPlan:
        planned = outline.planned()
        if self._drafter is None and len(outline.decodes) == len(self._running) == len(planned):
            self._all_decode = planned
        self._counters.step_tokens.append(outline.num_tokens)
        return self._in_flight.send(planned, outline.admissions, [row for _, _, row in planned], outline.num_tokens)

    def _plan_decodes(self, outline: Outline) -> list[Sequence]:
        """Rows for running sequences that need only their newest token; returns those that are behind by more."""
        running, no_pages, drafter = self._running, self._no_pages, self._drafter
        behind: list[Sequence] = []
        budget, decodes = outline.budget, outline.decodes
        for position, sequence in enumerate(running, start=1):  # who is preempted meanwhile stands behind
            start = sequence.num_computed
            known = len(sequence.token_ids) + sequence.num_pending
            if known - start != 1 or start < sequence.prompt_len:
                behind.append(sequence)
                continue
            if known >= sequence.max_len or not budget or (drafter is not None and sequence.num_pending):
                continue  # ends by length when its pending token arrives, or has to wait
            drafts: tuple[int, ...] = ()
            if drafter is not None:
                room = min(budget - 1 - (len(running) - position), sequence.max_len - known - 1)
                drafts = proposed(drafter, self._cache, sequence, start, room)
            num_tokens = 1 + len(drafts)
            new_pages = no_pages
            if start + num_tokens > sequence.table.capacity:
                got_pages = self._reserve_or_preempt(sequence, start + num_tokens)
                if got_pages is None:
                    break  # it was the last in order and has given way itself, or is alone and has to wait
                new_pages = got_pages
            row = Row(sequence.slot, start, num_tokens, new_pages, True, True, drafts)
            sequence.num_computed = start + 1
            sequence.num_pending += 1
            budget -= num_tokens
            decodes.append((sequence, sequence.epoch, row))
        outline.budget = budget
        return behind

    def _reserve_or_preempt(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], ...] | None:
        """Room for `num_tokens` tokens, taken from the last in order if need be; None: that was the sequence itself, or
        it is the only one, and its own steps in flight will let pages go.

        Victims stand behind the sequence in order, and rows are planned in order, so no victim has a row in this plan.
        """
        while True:
            new_pages = self._cache.reserve(sequence.table, num_tokens)
            if new_pages is not None:
                return new_pages
            victim = self._running[-1]
            if victim is sequence and len(self._running) == 1:
                return None
            self._preempt(victim)
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_slot(sequence)
        self._cache.release(sequence.table)
        sequence.num_computed = 0
        sequence.epoch += 1
        sequence.state = State.WAITING
        self._waiting.add(sequence)
        self._counters.num_preemptions += 1

    def _plan_chunk(self, outline: Outline, sequence: Sequence) -> None:
        """One row of at most the budget for a running sequence that is behind.

        A sequence waiting for its own results (nothing known is left to compute) gets none, nor does one without pages.
        """
        start = sequence.num_computed
        known = len(sequence.token_ids)  # nothing is pending: a pending token makes it a decode
        num_tokens = min(outline.budget, known - start)
        if num_tokens < 1:
            return
        new_pages = self._no_pages
        if start + num_tokens > sequence.table.capacity:
            # As at an admission: a chunk that takes the last page is thrown out by the next decode.
            spare = 0 if sequence is self._running[0] else len(self._running) - 1
            got_pages = self._cache.reserve(sequence.table, start + num_tokens, spare_pages=spare)
            if got_pages is None:
                outline.is_blocked = True
                return
            new_pages = got_pages
        samples = start + num_tokens == known
        is_decode = samples and num_tokens == 1 and start >= sequence.prompt_len
        sequence.num_computed = start + num_tokens
        sequence.num_pending += samples
        outline.add(sequence, Row(sequence.slot, start, num_tokens, new_pages, samples, is_decode))

    def _admit(self, outline: Outline) -> None:
        """Waiting sequences into slots, strictly in order: the first that cannot enter holds back those behind it."""
        cache = self._cache
        while outline.budget and self._free_slots and len(self._waiting):
            sequence = self._waiting[0]
            if sequence.num_pending:
                return  # preempted with a token on its way, whose id the admission must name
            tokens, table, request = sequence.token_ids, sequence.table, sequence.request
            hit = None if sequence.wants_prompt_logprobs else cache.lookup(table, tokens)
            start = 0 if hit is None else hit.num_tokens
            chunk_end = min(start + outline.budget, len(tokens))
            if cache.reserve(table, chunk_end, hit, len(self._running), whole_len=len(tokens)) is None:
                return
            self._waiting.remove(sequence)
            self._running.add(sequence)
            sequence.state = State.RUNNING
            sequence.slot = self._free_slots.pop()
            sequence.num_computed = start
            if request.num_cached_tokens is None:
                request.num_cached_tokens = sequence.num_computed
                self._counters.num_prefix_hit_tokens += sequence.num_computed
                self._counters.num_prompt_tokens += sequence.prompt_len
            if request.parked and sequence.num_computed >= self._shared_prompt_len(sequence.prompt_len):
                self._unpark(request)
            outline.admissions.append(admission_of(sequence))
            self._plan_chunk(outline, sequence)

    # -- apply ---------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> News:
        """Take in the outcome of the oldest plan in flight.

        Raises:
            ValueError: not the oldest plan's result, or rows that do not match it (a bug of the runner).
        """
        planned = self._in_flight.land(result)
        if isinstance(planned, SteadyStep):
            if planned.decodes is self._steady:
                said = planned.decodes.apply(planned.rows, result)
                if said is not None:
                    self._counters.num_generated_tokens += len(said)
                    return said
                self._end_steady()
            planned = planned.planned()
        outputs: list[SequenceOutput] = []
        num_continued = 0
        for (sequence, epoch, row), got in zip(planned, result.rows, strict=True):
            if sequence.state is State.FINISHED:
                continue  # found finished late: dropped here, once
            if row.slot != got.slot:
                raise ValueError(f"step {result.step_id}: the row of slot {row.slot} got a result of slot {got.slot}")
            is_current = epoch == sequence.epoch
            output = continued(sequence, row, got) if is_current else None
            if output is None:
                output = self._apply_row(sequence, is_current, row, got)
            else:
                num_continued += 1
                if row.start >= sequence.table.commit_at - 1:
                    self._cache.commit(sequence.table, sequence.token_ids, row.start + 1)
            if output is not None:
                outputs.append(output)
        self._counters.num_generated_tokens += num_continued
        return outputs

    def _apply_row(self, sequence: Sequence, is_current: bool, row: Row, got: RowResult) -> SequenceOutput | None:
        """One row's outcome. `is_current`: not preempted since it was planned, so the row's pages are still its own."""
        if got.error is not None:
            self._counters.num_row_errors += 1
            return self._finish(sequence, "error", error=got.error, error_code=got.error_code)
        if sequence.sampling.prompt_logprobs is not None:
            sequence.request.collect_prompt_logprobs(row.start, got.prompt_logprobs)
        new_ids, reason, stop_token_id = take_tokens(sequence, row, got)
        self._counters.num_generated_tokens += len(new_ids)
        if is_current:
            num_done = row.start + row.num_tokens
            if row.draft_token_ids:  # of the drafts, only the accepted have keys and values that stay
                num_done = sequence.num_computed = row.start + len(got.token_ids)
            if num_done >= sequence.table.commit_at:
                self._cache.commit(sequence.table, sequence.token_ids, min(num_done, len(sequence.token_ids)))
            request = sequence.request
            if request.parked and num_done >= self._shared_prompt_len(sequence.prompt_len):
                self._unpark(request)
        if not row.samples:
            return None
        if reason is not None:
            return self._finish(sequence, reason, new_ids, got, stop_token_id)
        return news(sequence, new_ids, got)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        new_ids: list[int] | None = None,
        got: RowResult | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> SequenceOutput:
        """End a live sequence wherever it is, and make its one terminal output."""
        request = sequence.request
        output = news(sequence, new_ids if new_ids is not None else [], got)
        output.finish_reason = reason
        output.stop_token_id = stop_token_id
        output.error, output.error_code = error, error_code
        if sequence.state is State.RUNNING:
            self._leave_slot(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            request.parked.remove(sequence.index)
            self._num_parked -= 1
        if reason == "error":  # pages that may hold what went wrong (NaN) must not be found by others
            self._cache.release(sequence.table, forget=True)
        self._cache.close(sequence.table)
        sequence.state = State.FINISHED
        del request.sequences[sequence.index]
        if request.parked and len(request.parked) == len(request.sequences):
            self._unpark_one(request)  # whoever was to compute the prompt is gone
        if not request.sequences:
            del self._requests[request.request_id]
            if request.private_root is not None:
                self._cache.end_private_root(request.private_root)
        return output

    def _end_steady(self) -> None:
        """From here on every sequence is looked at again."""
        self._all_decode = None
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    def _leave_slot(self, sequence: Sequence) -> None:
        self._end_steady()
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT

    def _shared_prompt_len(self, prompt_len: int) -> int:
        """Prompt tokens in whole pages that siblings can find: one token at least is always computed."""
        return (prompt_len - 1) // self._cache.page_size * self._cache.page_size

    def _unpark(self, request: Request) -> None:
        while request.parked:
            self._unpark_one(request)

    def _unpark_one(self, request: Request) -> None:
        sequence = request.sequences[request.parked.pop(0)]
        self._num_parked -= 1
        sequence.state = State.WAITING
        self._waiting.add(sequence)

    # -- accounting ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a sequence lives or a result is in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for a slot, memory, or the prompt they share."""
        return len(self._waiting) + self._num_parked

    def flush_cache(self) -> str | None:
        """Empty the prefix cache; or say why not (requests run), changing nothing."""
        if self._requests:
            return f"{len(self._requests)} requests are running or waiting; flush the cache when there are none"
        self._cache.flush()
        return None

    def stats(self) -> EngineStats:
        """A snapshot; `step_tokens` starts anew with each."""
        return self._counters.snapshot(self._cache, self.num_running, self.num_waiting)

    def check(self) -> None:
        """Raise AssertionError unless the invariants of scheduler and cache hold."""
        self._cache.check()
        if self._steady is not None:
            self._steady.settle()
        assert self._requests or not self._cache.num_pages_used, "pages are held though no request lives"
        invariants.check(
            invariants.Snapshot(
                requests=self._requests.values(),
                running=self._running,
                waiting=self._waiting,
                num_parked=self._num_parked,
                free_slots=self._free_slots,
                max_num_seqs=self._max_num_seqs,
                in_flight=self._in_flight.planned(),
            )
        )
