"""A runner without a model that holds what a device holds and notices every wrong plan.

Every slot of every page stores the cache group and the hash of the token history that was written there. A row may only
run when all positions before it that it sees (all, or a sliding group's window) hold exactly its own history, and when
no other row of the step writes there, so a wrong prefix hit, a page handed out too early or let go too early, a lost
token or a row out of order is caught where it happens. The next token is a hash of the whole visible history (and the
seed, when not greedy): results must equal `expected_output`, which knows nothing of pages, steps or other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, RowResult, StepPlan, StepResult, TokenLogprobs, results_of

EOS = 0
POISON = 999  # a history with this token gives NaN logits
EMPTY = (-1, -1)


def extend(history: int, token_id: int) -> int:
    return hash((history, token_id))


def history_of(token_ids: list[int]) -> int:
    history = 7
    for token_id in token_ids:
        history = extend(history, token_id)
    return history


def next_token(history: int, sampling: SamplingParams, banned: tuple[int, ...], num_output: int, vocab: int) -> int:
    """The fake model: any history decides its successor; banned ids are passed over while too little is out."""
    token_id = hash((history, 0 if sampling.is_greedy else sampling.seed)) % vocab
    while num_output < sampling.min_tokens and token_id in banned:
        token_id = (token_id + 1) % vocab
    return token_id


def expected_output(
    request: AddRequest, index: int, seed: int, max_len: int, vocab: int, eos: tuple[int, ...] = (EOS,)
) -> tuple[list[int], str, int | None]:
    """(output tokens, finish reason, stop token) of one sequence alone in the world."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    wrapped = (seed + index + 2**63) % 2**64 - 2**63
    seeded = SamplingParams(temperature=sampling.temperature, min_tokens=sampling.min_tokens, seed=wrapped)
    if POISON in request.prompt_token_ids:
        return [], "error", None
    history, output = history_of(request.prompt_token_ids), []
    max_len = min(max_len, len(request.prompt_token_ids) + (sampling.max_tokens or max_len))
    while True:
        token_id = next_token(history, seeded, tuple(stops), len(output), vocab)
        if token_id in stops and len(output) >= sampling.min_tokens:
            return [*output, token_id], "stop", token_id
        output.append(token_id)
        history = extend(history, token_id)
        if len(request.prompt_token_ids) + len(output) >= max_len:
            return output, "length", None


@dataclass
class Slot:
    admission: Admission
    tokens: list[int]
    pages: tuple[list[int], ...] = ()  # a cache group each; what the scheduler lets go is never taken out
    has_failed: bool = False  # no token came, yet a row for it may already be planned


class SimulatedDevice:
    """Executes plans strictly in order."""

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        budget: int,
        vocab: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.page_size, self.budget, self.vocab, self.num_slots = page_size, budget, vocab, num_slots
        self.windows = windows
        self.memory = [[EMPTY] * page_size for _ in range(num_pages)]
        self.slots: dict[int, Slot] = {}
        self.next_step_id = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.seeds: dict[tuple[str, int], int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        assert plan.rows and plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= self.budget
        kinds = [row.is_decode for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows stand first"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "one row a slot"
        assert {a.slot for a in plan.admissions} <= {row.slot for row in plan.rows}, "an admission has a row"
        assert len({a.slot for a in plan.admissions}) == len(plan.admissions)
        for admission in plan.admissions:
            self._admit(admission)
        for row in plan.rows:
            for pages, new in zip(self.slots[row.slot].pages, row.new_pages, strict=True):
                assert all(page >= 0 for page in new)
                pages.extend(new)
        # All reads before all writes: nothing may lean on a page that this very step computes.
        reads = [self._check_reads(row) for row in plan.rows]
        writes = [self._write(row) for row in plan.rows]
        for number, pages in enumerate(writes):
            for other in range(len(plan.rows)):
                assert other == number or not pages & (reads[other] | writes[other]), "a row writes to another's page"
        return StepResult(plan.step_id, results_of(plan.rows, [self._sample(row) for row in plan.rows]))

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.slot < self.num_slots
        assert admission.sampling.seed is not None, "the scheduler draws the seed"
        known = self.seeds.setdefault((admission.request_id, admission.index), admission.sampling.seed)
        assert known == admission.sampling.seed, "the seed survives a preemption"
        assert len(admission.pages) == len(self.windows)
        pages = tuple(list(pages) for pages in admission.pages)
        self.slots[admission.slot] = Slot(admission, list(admission.token_ids), pages)

    def _place(self, slot: Slot, group: int, position: int) -> tuple[int, int]:
        pages = slot.pages[group]
        assert position < len(pages) * self.page_size, "a token without a page"
        page = pages[position // self.page_size]
        assert page >= 0, "a page that was never there"
        return page, position % self.page_size

    def _check_reads(self, row: Row) -> set[int]:
        """The pages that the row sees and does not write."""
        slot = self.slots[row.slot]
        if slot.has_failed:
            return set()
        end = row.start + row.num_tokens - len(row.draft_token_ids)
        assert row.num_tokens >= 1 and end <= len(slot.tokens), "tokens that nobody knows"
        assert row.samples == (end == len(slot.tokens)), "samples means: up to the last known token"
        assert row.is_decode == (row.samples and end - row.start == 1 and row.start >= slot.admission.prompt_len)
        history, pages = 7, set()
        for position in range(row.start):
            history = extend(history, slot.tokens[position])
            for group, window in enumerate(self.windows):
                if window is not None and position <= row.start - window:
                    continue  # the row's first token sees itself and window - 1 before it
                page, offset = self._place(slot, group, position)
                pages.add(page)
                assert self.memory[page][offset] == (group, history), (
                    f"position {position} of slot {row.slot} holds another history in group {group}"
                )
        return pages

    def _write(self, row: Row) -> set[int]:
        """Write the row's tokens; the pages written to."""
        slot = self.slots[row.slot]
        if slot.has_failed:
            return set()
        tokens = slot.tokens + list(row.draft_token_ids)
        history = history_of(tokens[: row.start])
        pages = set()
        for position in range(row.start, row.start + row.num_tokens):
            history = extend(history, tokens[position])
            for group in range(len(self.windows)):
                page, offset = self._place(slot, group, position)
                self.memory[page][offset] = (group, history)
                pages.add(page)
        return pages

    def _sample(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        admission, sampling = slot.admission, slot.admission.sampling
        if slot.has_failed:
            return RowResult(row.slot, [], error="failed before")
        prompt_logprobs = []
        if sampling.prompt_logprobs is not None:
            end = min(row.start + row.num_tokens, admission.prompt_len - 1)
            prompt_logprobs = [logprob_at(slot.tokens, position + 1) for position in range(row.start, end)]
        if not row.samples:
            return RowResult(row.slot, [], [], prompt_logprobs)
        if POISON in slot.tokens:
            slot.has_failed = True
            return RowResult(row.slot, [], [], [], error="NaN logits")
        new: list[int] = []
        for draft in (*row.draft_token_ids, None):
            token_id = next_token(
                history_of(slot.tokens),
                sampling,
                admission.banned_token_ids,
                len(slot.tokens) - admission.prompt_len,
                self.vocab,
            )
            slot.tokens.append(token_id)
            new.append(token_id)
            if token_id != draft:
                break
        first = len(slot.tokens) - len(new)
        logprobs = (
            [logprob_at(slot.tokens, first + i) for i in range(len(new))] if sampling.logprobs is not None else []
        )
        return RowResult(row.slot, new, logprobs, prompt_logprobs)


def logprob_at(token_ids: list[int], position: int) -> TokenLogprobs:
    """A logprob that names its position, so that a missing or doubled entry shows."""
    return TokenLogprobs(token_ids[position], -float(position), 1, [token_ids[position]], [-float(position)])
