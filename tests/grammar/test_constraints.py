"""What the runner keeps a slot: markers, replay after preemption, ends, limits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from grammar_support import BYTES, EOS

from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import GrammarOptions
from tokenspeed.protocol.grammar import INVALID_GRAMMAR, GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams, ThinkingBudget
from tokenspeed.protocol.step import Admission
from tokenspeed.runner import constraints as constraints_module
from tokenspeed.runner.constraints import Constraints, Fault
from tokenspeed.sampling.masks import TokenMasks
from tokenspeed.sampling.sampler import Sampler

VOCAB = len(BYTES.tokens)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler("llguidance", lambda: BYTES, GrammarOptions(), timeout_s=30.0)
    yield made
    made.close()


def spec(text: str, starts_after: tuple[int, ...] | None = None) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, starts_after=starts_after)


def admission(slot: int, grammar: GrammarSpec | None, output: bytes = b"", **sampling: object) -> Admission:
    params = SamplingParams(seed=1, temperature=0.0, **sampling)
    return Admission(slot, "r", 0, [*b"prompt", *output], 6, ([],), params, (EOS,), grammar)


def may(constraints: Constraints, slot: int) -> set[int] | None:
    """Ids that a slot may sample; None: any."""
    if not constraints.rows([slot]):
        return None
    words = constraints.fill([slot], [0])
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[0, :VOCAB]
    return set(np.flatnonzero(bits).tolist())


def fault(constraints: Constraints, token_id: int) -> Fault:
    """Why slot 0 cannot go on behind this token."""
    found = constraints.accept(0, token_id)
    assert found is not None
    return found


def test_rows_are_those_with_a_grammar(compiler: GrammarCompiler):
    grammar, other = spec("ab"), spec("xy")
    _keep = [compiler.submit(grammar).result(60), compiler.submit(other).result(60)]
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    constraints.admit(admission(1, None))
    constraints.admit(admission(2, other))
    assert constraints.rows([1, 2, 0]) == [1, 2]
    words = constraints.fill([1, 2, 0], [1, 2])
    assert words.shape == (2, BYTES.num_words)
    assert may(constraints, 0) == {ord("a")}
    assert may(constraints, 2) == {ord("x")}
    assert constraints.accept(1, 5) is None
    constraints.admit(admission(0, None))
    assert constraints.rows([0]) == []


def test_a_preempted_sequence_goes_on_where_it_was(compiler: GrammarCompiler):
    grammar = spec("abc|abd")
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(3, grammar, b"ab"))
    assert may(constraints, 3) == {ord("c"), ord("d")}


def test_the_constraint_starts_behind_the_marker(compiler: GrammarCompiler):
    grammar = spec("ab", starts_after=(ord("<"), ord("/")))
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    for token_id in b"free < / <":
        assert may(constraints, 0) is None
        assert constraints.accept(0, token_id) is None
    assert may(constraints, 0) is None
    constraints.accept(0, ord("/"))
    assert may(constraints, 0) == {ord("a")}
    constraints.admit(admission(0, grammar, b"think</a"))
    assert may(constraints, 0) == {ord("b")}
    constraints.admit(admission(0, grammar, b"think<"))
    assert may(constraints, 0) is None


def test_the_output_cannot_end_before_the_constraint_has_started(compiler: GrammarCompiler):
    """The bug: a model that ended its output inside its reasoning answered `stop` with content that obeyed nothing, as
    the constraint waited for a marker that never came. What ends a sequence is forbidden until the marker is there."""
    grammar = msgspec.structs.replace(spec("ab", starts_after=(ord("<"), ord("/"))), withheld=(EOS, ord("s")))
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    for token_id in b"free <":
        assert may(constraints, 0) == set(range(VOCAB)) - {EOS, ord("s")}
        assert constraints.accept(0, token_id) is None
    constraints.accept(0, ord("/"))
    assert may(constraints, 0) == {ord("a")}
    constraints.admit(admission(0, grammar, b"think<"))
    assert may(constraints, 0) == set(range(VOCAB)) - {EOS, ord("s")}


@pytest.mark.parametrize("budget", [None, ThinkingBudget(9, tuple(b"</"), tuple(b".:</"), ord("."))])
def test_a_bridge_leads_to_the_constraint(compiler: GrammarCompiler, budget: ThinkingBudget | None):
    """The bug: gpt-oss left its reasoning for a channel that the constraint did not wait for, and obeyed nothing."""
    grammar = msgspec.structs.replace(spec("ab", starts_after=tuple(b"</")), bridge=tuple(b".:</"), withheld=(EOS,))
    _keep = compiler.submit(spec("ab")).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar, thinking=budget))
    for token_id in b"free.":
        assert may(constraints, 0) == set(range(VOCAB)) - {EOS}
        assert constraints.accept(0, token_id) is None
    for token_id in b":</":
        assert may(constraints, 0) == {token_id}
        assert constraints.accept(0, token_id) is None
    assert may(constraints, 0) == {ord("a")}
    constraints.admit(admission(0, grammar, b"think.:", thinking=budget))
    assert may(constraints, 0) == {ord("<")}, "preempted on the bridge"
    if budget is not None:
        constraints.admit(admission(0, grammar, b"reasoning", thinking=budget))
        for token_id in b".:</a":
            assert may(constraints, 0) == {token_id}
            constraints.accept(0, token_id)


def test_a_budget_is_for_reasoning_alone(compiler: GrammarCompiler):
    """The bug: a gpt-oss that called a function behind its analysis wrote no final channel, so its budget went on
    counting, and closed the reasoning in the middle of the call's arguments."""
    constraints = Constraints(compiler, VOCAB)
    budget = ThinkingBudget(4, tuple(b"</"), tuple(b".</"), ord("."))
    constraints.admit(admission(0, None, b"th.", thinking=budget))
    for token_id in b"call {}":
        assert may(constraints, 0) is None
        constraints.accept(0, token_id)
    assert not constraints.holds(0)
    constraints.admit(admission(0, None, b"long", thinking=budget))
    for token_id in b".</":
        assert may(constraints, 0) == {token_id}, "the mark that the budget wrote is not the model's"
        constraints.accept(0, token_id)
    assert not constraints.holds(0)


@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_budget_closes_the_reasoning(compiler: GrammarCompiler, has_grammar: bool):
    """The bug: `thinking.budget_tokens` was taken and did nothing."""
    ends = tuple(b"</")
    grammar = msgspec.structs.replace(spec("ab", starts_after=ends), withheld=(EOS,)) if has_grammar else None
    _keep = compiler.submit(spec("ab")).result(60)
    free = set(range(VOCAB)) - {EOS} if has_grammar else None
    behind = {ord("a")} if has_grammar else None
    constraints = Constraints(compiler, VOCAB)
    for num_before, begun, rest in ((4, b"", b".</"), (3, b".", b"</"), (2, b".<", b"/"), (3, b"<", b".</")):
        budget = ThinkingBudget(num_tokens=num_before + len(begun), ends=ends, closing=tuple(b".</"))
        constraints.admit(admission(0, grammar, thinking=budget))
        for token_id in b"free"[:num_before] + begun:
            assert may(constraints, 0) == free
            assert constraints.accept(0, token_id) is None
        for token_id in rest:
            assert may(constraints, 0) == {token_id}
            assert constraints.accept(0, token_id) is None
        assert may(constraints, 0) == behind and constraints.holds(0) == has_grammar
    constraints.admit(admission(0, grammar, b"th</", thinking=budget))
    assert may(constraints, 0) == behind, "it ended by itself"
    constraints.admit(admission(0, grammar, b"think.", thinking=budget))
    assert may(constraints, 0) == {ord("<")}, "preempted meanwhile"


def test_after_the_end_only_the_end(compiler: GrammarCompiler):
    """With ignore_eos, or in a step planned before the end was known."""
    grammar = spec("a")
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    for token_id in (ord("a"), EOS, EOS, EOS):
        assert constraints.accept(0, token_id) is None
        assert may(constraints, 0) == {EOS}


def test_a_token_outside_of_the_grammar_ends_the_sequence(compiler: GrammarCompiler):
    grammar = spec("ab")
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    assert "not allow" in fault(constraints, ord("x")).error
    assert constraints.rows([0]) == []
    assert "not allow" in fault(constraints, ord("a")).error


def test_a_grammar_that_takes_too_long_ends_its_own_sequence(compiler: GrammarCompiler, monkeypatch):
    grammar = spec("[a-z]*")
    _keep = compiler.submit(grammar).result(60)
    constraints = Constraints(compiler, VOCAB)
    constraints.admit(admission(0, grammar))
    constraints.admit(admission(1, None))
    monkeypatch.setattr(constraints_module, "EARNED_S", -1.0)
    assert may(constraints, 0) is not None
    found = fault(constraints, ord("a"))
    assert found.code == INVALID_GRAMMAR and "less ambiguous" in found.error
    assert constraints.rows([0]) == []
    assert constraints.accept(1, ord("a")) is None


class Failing:
    """A matcher whose library cannot go on."""

    is_terminated = False
    failure: str | None = None

    def __init__(self, where: str) -> None:
        self.where = where

    def fill(self, row: np.ndarray) -> bool:
        if self.where == "fill":
            raise RuntimeError("too many states")
        return False

    def accept(self, token_id: int) -> bool:
        if self.where == "accept":
            raise RuntimeError("too many states")
        self.failure = "too many states"
        return False


@pytest.mark.parametrize("where", ["fill", "accept", "limit"])
def test_what_a_library_cannot_do_fails_its_own_row_as_the_users_error(where: str):
    """The bug: a limit of llguidance was told as `a token the grammar does not allow` and a 500; an exception of
    a library, as for too large a grammar, ended the whole engine."""

    class Compiler:
        def compiled(self, _spec: GrammarSpec) -> Any:
            return self

        def matcher(self) -> Failing:
            return Failing(where)

    constraints = Constraints(Compiler(), VOCAB)  # type: ignore[arg-type]
    constraints.admit(admission(0, spec("a")))
    assert may(constraints, 0) == set(range(VOCAB))
    found = fault(constraints, 1)
    assert found.code == INVALID_GRAMMAR and "too many states" in found.error
    assert constraints.rows([0]) == []


class Many:
    """A compiler and its grammars: slot n may sample the token n; `fail` and `nap_s` are of filling together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail, self.nap_s, self.num_together, self.num_calls = False, 0.0, 0, 0
        self.slow: set[int] = set()
        self._now_s = 0.0
        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(constraints_module.time, clock, lambda: self._now_s)

    def compiled(self, grammar: GrammarSpec) -> Any:
        return SimpleNamespace(matcher=lambda: self.matcher(int(grammar.text)))

    def matcher(self, token_id: int) -> Any:
        def fill(row: np.ndarray) -> bool:
            self._now_s += 0.05 if token_id in self.slow else 0.0
            row[:] = 0
            row.view("uint32")[token_id // 32] = 1 << token_id % 32
            return True

        return SimpleNamespace(fill=fill, accept=lambda _: True, is_terminated=token_id == 3, failure=None)

    def fill_all(self, matchers: list[Any], rows: np.ndarray) -> None:
        if self.fail:
            raise RuntimeError("one of them")
        self.num_together = len(matchers)
        self.num_calls += 1
        self._now_s += self.nap_s
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(row)


def test_many_masks_are_filled_together(monkeypatch: pytest.MonkeyPatch):
    """Whoever is slow is filled, and charged, alone from then on; a failure costs nobody else anything."""
    many = Many(monkeypatch)
    constraints = Constraints(many, VOCAB)  # type: ignore[arg-type]
    slots = list(range(8))
    for slot in slots:
        constraints.admit(admission(slot, spec(str(slot), starts_after=(9,) if slot == 5 else None)))
    constraints.admit(admission(5, GrammarSpec(kind="regex", text="5", starts_after=(9,), withheld=(EOS,))))

    def filled() -> list[set[int]]:
        out = np.full((len(slots), -(-VOCAB // 32)), 85, dtype=np.int32)
        words = constraints.fill(slots, slots, out)
        assert words is out
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        return [set(np.flatnonzero(row).tolist()) for row in bits]

    wanted = [{slot} if slot != 5 else set(range(VOCAB)) - {EOS} for slot in slots]
    assert filled() == wanted
    assert many.num_together == 6, "all but the one that is terminated and the one that reasons"
    many.fail = True
    assert filled() == wanted
    many.fail = False
    many.slow = {6}
    for _ in range(3):
        assert filled() == wanted
    assert many.num_together == 5
    for _ in range(10):
        assert filled() == wanted
    assert constraints.accept(1, 1) is None
    found = constraints.accept(6, 6)
    assert found is not None and "ambiguous" in found.error
    many.slow = set()
    filled()
    assert constraints.rows(slots) == [0, 1, 2, 3, 4, 5, 7]


def test_masks_that_are_all_filled_together_need_no_other_memory(monkeypatch: pytest.MonkeyPatch):
    many = Many(monkeypatch)
    constraints = Constraints(many, VOCAB)  # type: ignore[arg-type]
    slots = [0, 1, 2, 4, 6]
    for slot in slots:
        constraints.admit(admission(slot, spec(str(slot))))
    places: list[object] = []
    fill_all = many.fill_all
    monkeypatch.setattr(many, "fill_all", lambda matchers, rows: (places.append(rows), fill_all(matchers, rows)))
    out = np.full((len(slots), -(-VOCAB // 32)), 85, dtype=np.int32)
    constraints.fill(slots, range(len(slots)), out)
    assert len(places) == 1 and places[0] is out
    assert [np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() for row in out] == [
        [slot] for slot in slots
    ]


def test_a_grammar_that_is_slow_now_and_then_is_charged(monkeypatch: pytest.MonkeyPatch):
    """The bug: what a slow mask took of the time of all was charged to nobody. Each was timed by itself at its next
    token, where a grammar that alternates was quick, and went back among the others for the slow one behind that."""
    many = Many(monkeypatch)
    constraints = Constraints(many, VOCAB)  # type: ignore[arg-type]
    slots = [0, 1, 2, 4, 5, 6]
    for slot in slots:
        constraints.admit(admission(slot, spec(str(slot))))
    faults: dict[int, Fault] = {}
    for step in range(20):
        many.slow = {6} if step % 2 == 0 else set()
        constraints.fill(slots, constraints.rows(slots))
        for slot in slots:
            found = constraints.accept(slot, slot)
            if found is not None:
                faults.setdefault(slot, found)
        assert many.num_together == (6 if step == 0 else 5)
    assert list(faults) == [6] and "ambiguous" in faults[6].error


def test_a_slow_mask_among_others_costs_twice(monkeypatch: pytest.MonkeyPatch):
    """All have waited for it when they were filled together, and again for the one filled by itself."""
    many = Many(monkeypatch)
    constraints = Constraints(many, VOCAB)  # type: ignore[arg-type]
    for slot in (0, 1, 2, 4):
        constraints.admit(admission(slot, spec(str(slot))))
    many.slow = {4}
    constraints.fill([0, 1, 2, 4], [0, 1, 2, 3])
    credits = [constraints._slots[slot].credit_s for slot in (0, 1, 2, 4)]
    assert credits == pytest.approx([0.25, 0.25, 0.25, 0.15])


def test_nobody_is_charged_where_each_is_quick(monkeypatch: pytest.MonkeyPatch):
    """Too few cores for so many: then they are filled one by one for a while."""
    many = Many(monkeypatch)
    many.nap_s = 0.05
    constraints = Constraints(many, VOCAB)  # type: ignore[arg-type]
    slots = [0, 1, 2, 4]
    for slot in slots:
        constraints.admit(admission(slot, spec(str(slot))))
    for num_calls in (1, 2):
        for _ in range(1 + constraints_module.APART_TOKENS):
            words = constraints.fill(slots, [0, 1, 2, 3]).view(np.uint32)
            assert words[:, 0].tolist() == [1 << slot for slot in slots]
            assert many.num_calls == num_calls
    assert all(constraints.accept(slot, slot) is None for slot in slots)


def test_a_grammar_that_is_gone_fails_its_row_only():
    """The request was aborted while its admission was on its way to the runner."""
    constraints = Constraints(None, VOCAB)
    constraints.admit(admission(0, spec("a")))
    assert constraints.rows([0]) == []
    assert constraints.accept(0, 1) == Fault("the grammar is not compiled")


# ---- masks in the sampler -------------------------------------------------------------------------------------------


def masks(rows: list[int], *allowed: set[int]) -> TokenMasks:
    words = np.zeros((len(rows), BYTES.num_words), dtype=np.uint32)
    for place, ids in enumerate(allowed):
        for token_id in ids:
            words[place, token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMasks(rows, words.view(np.int32))


def sampler_with(*sampling: SamplingParams) -> Sampler:
    sampler = Sampler(len(sampling), VOCAB, torch.device("cpu"))
    for slot, params in enumerate(sampling):
        sampler.admit(Admission(slot, "r", 0, [1, 2], 2, ([],), params, (EOS,)))
    return sampler


def test_masked_rows_sample_what_is_allowed_and_others_are_untouched():
    greedy, drawn = SamplingParams(seed=1, temperature=0.0), SamplingParams(seed=2, temperature=1.0)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    slots, positions = [0, 1, 2, 3], [2, 2, 2, 2]
    free = sampler_with(greedy, greedy, drawn, drawn).sample(logits, slots, positions).token_ids
    bound = sampler_with(greedy, greedy, drawn, drawn).sample(
        logits, slots, positions, masks([1, 3], {7, 9, EOS}, {8, 200})
    )
    assert bound.token_ids[0] == free[0]
    assert bound.token_ids[2] == free[2]
    assert int(bound.token_ids[1]) == max((7, 9, EOS), key=lambda token_id: float(logits[1, token_id]))
    assert int(bound.token_ids[3]) in (8, 200)
    assert not bound.failed.any()


def test_bias_and_penalties_do_not_bring_back_what_is_forbidden():
    params = SamplingParams(
        seed=1, temperature=1.0, logit_bias={5: 100.0}, repetition_penalty=0.5, frequency_penalty=-2.0, top_p=0.9
    )
    logits = torch.zeros(1, VOCAB)
    for position in range(2, 12):
        drawn = sampler_with(params).sample(logits, [0], [position], masks([0], {11, 12}))
        assert int(drawn.token_ids[0]) in (11, 12)


def test_a_ban_is_lifted_where_it_would_leave_nothing():
    params = SamplingParams(seed=1, temperature=0.0, min_tokens=5)
    logits = torch.zeros(1, VOCAB)
    only_end = sampler_with(params).sample(logits, [0], [2], masks([0], {EOS}))
    assert int(only_end.token_ids[0]) == EOS
    logits[0, EOS] = 9.0
    either = sampler_with(params).sample(logits, [0], [2], masks([0], {EOS, 3}))
    assert int(either.token_ids[0]) == 3


def test_log_probabilities_are_the_models_own():
    params = SamplingParams(seed=1, temperature=0.0, logprobs=1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 3.0
    (row,) = sampler_with(params).sample(logits, [0], [2], masks([0], {6})).finish()
    assert row.logprobs is not None
    assert row.logprobs.top_ids == [4]
    assert row.logprobs.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[6]))
