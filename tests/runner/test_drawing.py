"""What rows ask of the GPU runner besides a token: one text for one seed, edits are followed, nothing waits.
`cuda_support` stands for the GPU where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from cuda_support import (
    BOTH_WAYS,
    GREEDY,
    LLAMA,
    NUM_PAGES,
    ON_GPU,
    SLOTS,
    InTurn,
    Recording,
    opened,
    recording_fixture,  # noqa: F401
    run,
    slot_ops,
)
from runner_support import Plans, as_columns
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.kernels.slot_ops import PickedRows
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, SteadyResults, SteadyRows, StepPlan, StepResult
from tokenspeed.runner.cuda_runner import GraphPlan
from tokenspeed.runner.interface import Pending
from tokenspeed.runner.launched_step import Sampled


def decoded(graphs: GraphPlan, recording: Recording, wanted: SamplingParams, banned: tuple[int, ...] = ()) -> list[int]:
    """What slot 1 samples beside others."""
    made = Plans(NUM_PAGES)
    first = [
        made.admit(0, [5, 9, 2], GREEDY),
        replace(made.admit(1, [7, 7, 1, 4], wanted), banned_token_ids=banned),
        made.admit(2, [3, 8], SamplingParams(temperature=0.7, seed=9)),
    ]
    steps = [made.step(first, [made.row(slot, length, samples=True) for slot, length in enumerate((3, 4, 2))])]
    steps += [made.step([], [made.decode(slot) for slot in range(3)]) for _ in range(8)]
    results, _ = run(steps, graphs, recording)
    mine = [row for rows in results for row in rows if row.slot == 1]
    assert all(len(row.logprobs) == (wanted.logprobs is not None) for row in mine)
    assert all(one.token_id == token for row in mine for one, token in zip(row.logprobs, row.token_ids, strict=False))
    return [token for row in mine for token in row.token_ids]


@BOTH_WAYS
def test_a_seeds_text_does_not_depend_on_what_else_is_asked(graphs: GraphPlan, recording: Recording) -> None:
    """Regression: rows with log-probabilities, a bias or penalties were drawn by another sampler, by other numbers."""
    plain = SamplingParams(temperature=1.2, top_k=50, seed=5)
    text = decoded(graphs, recording, plain)
    assert len(set(text)) > 3
    for asked in (
        {"logprobs": 3},
        {"logit_bias": {3: 0.0}},
        {"presence_penalty": 1e-30},
        {"min_tokens": 4},
        {"logprobs": 0, "frequency_penalty": 1e-30, "min_tokens": 9},
    ):
        wanted = msgspec.structs.replace(plain, **asked)
        assert decoded(graphs, recording, wanted, banned=(LLAMA.vocab_size + 1,)) == text


@BOTH_WAYS
def test_edits_of_logits_are_followed(graphs: GraphPlan, recording: Recording) -> None:
    """Two tokens that nothing else comes near; each is worth 4 less once sampled, then 2 less each time."""
    wanted = SamplingParams(
        temperature=0.0, logit_bias={17: 100.0, 18: 91.0}, presence_penalty=2.0, frequency_penalty=2.0, seed=0
    )
    assert decoded(graphs, recording, wanted)[:6] == [17, 17, 17, 17, 18, 17]
    wanted = msgspec.structs.replace(wanted, min_tokens=2)
    assert decoded(graphs, recording, wanted, banned=(17,))[:4] == [18, 18, 17, 17]


def test_capture_does_what_no_warm_up_step_does(recording: Recording) -> None:
    """Masks over the head's own logits were compiled by the first constrained request."""
    seen: set[tuple[torch.dtype, bool, bool]] = set()
    ops = slot_ops()

    def noted(logits: torch.Tensor, rows: PickedRows, masks: torch.Tensor | None, *others: Any) -> None:
        seen.add((logits.dtype, masks is not None, others[-1]))
        ops.redraw_rows(logits, rows, masks, *others)

    noting = replace(ops, redraw_rows=noted)
    with opened(GraphPlan(sizes=(1,)), recording, on_slots=noting) as runner:
        of_a_float32_model = {(torch.float32, True, True), (torch.float32, False, True)}
        assert seen == of_a_float32_model, "with the launches for filters, which no recorded step may have"
        assert float(runner._drawing.sampling.temperature[SLOTS]) == 0, "padding rows are greedy"


@BOTH_WAYS
def test_rows_with_a_grammar_are_drawn_again_at_once(graphs: GraphPlan, recording: Recording) -> None:
    """From the step's own logits; with the launches that filters need only where one of them filters."""
    ops, seen = slot_ops(), []

    def noted(logits: torch.Tensor, rows: PickedRows, masks: torch.Tensor | None, *others: Any) -> None:
        seen.append((rows.places.tolist(), masks is not None, others[-1]))
        ops.redraw_rows(logits, rows, masks, *others)

    made = Plans(NUM_PAGES)
    wishes = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=0),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    ]
    first = [
        replace(made.admit(slot, [5, 9, 2], wanted), grammar=GrammarSpec(kind="regex", text="") if slot else None)
        for slot, wanted in enumerate(wishes)
    ]
    steps = [made.step(first, [made.row(slot, 3, samples=True) for slot in range(SLOTS)])]
    for slots in ((0, 1, 2), (3, 0, 2), (0,)):
        steps.append(made.step([], [made.decode(slot) for slot in slots]))
    with opened(graphs, recording, grammars=InTurn(), on_slots=replace(ops, redraw_rows=noted)) as runner:
        seen.clear()
        pending = [runner.execute(plan) for plan in steps]
        rows = [row for one in pending for row in one.result().rows]
    texts = {slot: [row.token_ids[0] % 3 for row in rows if row.slot == slot] for slot in (1, 2, 3)}
    assert texts == {1: [0, 1], 2: [0, 1, 2], 3: [0, 1]}
    assert all(row.error is None for row in rows)
    assert seen == [([1, 2, 3], True, True), ([1, 2], True, False), ([0, 2], True, True)]


class Operations(TorchDispatchMode):
    """Notes what torch computes or copies, by name."""

    VIEWS = ("slice", "view", "select", "alias", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_behind_a_replay_a_grammar_costs_an_upload_and_a_drawing(recording: Recording) -> None:
    """What there was besides: three more uploads, a copy of the logits, four operations around the drawing, and a
    download for the grammar."""
    watched, drawn = Operations(), []
    ops = replace(slot_ops(), redraw_rows=lambda *_: drawn.append(list(watched.names)))
    made = Plans(NUM_PAGES)
    first = [made.admit(0, [5, 9, 2], GREEDY)]
    first.append(replace(made.admit(1, [7, 7], GREEDY), grammar=GrammarSpec(kind="regex", text="")))
    plan = made.step(first, [made.row(0, 3, samples=True), made.row(1, 2, samples=True)])
    with (
        opened(GraphPlan(), recording, grammars=InTurn(), on_slots=ops) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        drawn.clear()
        finish = runner._drawing.finish

        def noted(*args: Any) -> Sampled:
            with watched:
                return finish(*args)

        patch.setattr(runner._drawing, "finish", noted)
        runner.execute(plan).result()
    assert drawn == [["copy_"]], "rows and masks"
    assert watched.names == ["copy_", "copy_"], "the step's tokens to the host"


@contextlib.contextmanager
def launching(recording: Recording, num_waits: int) -> Iterator[None]:
    """What is done meanwhile waits for the device at most so often. (Of a real one, events do not count: a grammar's is
    not told from others.)"""
    if not ON_GPU:
        before = recording.device.num_waits
        yield
        assert recording.device.num_waits - before <= num_waits
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("are_columns", [False, True])
def test_launching_waits_for_nothing(has_grammar: bool, are_columns: bool, recording: Recording) -> None:
    """Whatever rows ask for, and however they come; a grammar waits for its last token, once a step. (Results wait, by
    design.)"""
    made = Plans(NUM_PAGES)
    wishes = [
        SamplingParams(temperature=0.0, logprobs=2, seed=0),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, seed=2, logit_bias={3: 1.0}, presence_penalty=0.5,
                       repetition_penalty=1.1, min_tokens=5),
        SamplingParams(temperature=0.9, frequency_penalty=0.5, seed=3),
    ]  # fmt: skip
    first = [made.admit(slot, [5, 9, 2], wanted) for slot, wanted in enumerate(wishes)]
    first[2] = replace(first[2], banned_token_ids=(4,))
    if has_grammar:
        first[::2] = [replace(one, grammar=GrammarSpec(kind="regex", text="")) for one in first[::2]]
    steps = [made.step(first, [made.row(slot, 3, samples=True) for slot in range(SLOTS)])]
    steps += [made.step([], [made.decode(slot) for slot in range(SLOTS)]) for _ in range(20)]
    if are_columns:
        steps = as_columns(steps)
        assert [isinstance(plan.rows, SteadyRows) for plan in steps] == [False] * 2 + [True] * 19
    graphs = GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16))
    with opened(graphs, recording, grammars=InTurn()) as runner:
        before: list[Pending[StepResult]] = []
        for plan in steps:
            with launching(recording, num_waits=int(has_grammar)):
                pending = runner.execute(plan)
            for earlier in before:
                assert all(row.error is None for row in earlier.result().rows)
            before = [pending]
        assert len(before[0].result().rows) == SLOTS


EVERYTHING = SamplingParams(
    temperature=0.0, logit_bias={3: 1.0}, presence_penalty=0.5, min_tokens=3, logprobs=2, seed=0
)


def steady_steps(made: Plans, first: list[Admission], then: list[int], count: int) -> list[StepPlan]:
    """A prompt of three tokens for each, a decode for each, and as many for those of slots `then`, as columns."""
    steps = [made.step(first, [made.row(admission.slot, 3, samples=True) for admission in first])]
    steps += [made.step([], [made.decode(admission.slot) for admission in first])]
    return steps + as_columns([made.step([], [made.decode(slot) for slot in then]) for _ in range(count)])


@pytest.mark.parametrize("others", [[0, 2], [0, 2, 3]], ids=["ended", "going on"])
def test_a_steady_step_touches_only_rows_that_ask(
    others: list[int], recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a request with penalties, a bias, banned tokens, log-probabilities or a grammar, each step of
    the others made all its rows, until the slot was filled again. (Slot 3 asks for edits as long as it lives, and only
    its own position is needed.)"""
    made = Plans(NUM_PAGES)
    first = [made.admit(slot, [5, 9, 2], GREEDY) for slot in (0, 2)]
    first.append(replace(made.admit(1, [5, 9, 2], EVERYTHING), grammar=GrammarSpec(kind="regex", text="")))
    first.append(made.admit(3, [5, 9, 2], SamplingParams(temperature=0.0, frequency_penalty=0.5, seed=0)))
    steps = steady_steps(made, first, others, 6)
    drawn: list[list[int]] = []
    with opened(GraphPlan(sizes=(1, 2, 4)), recording, grammars=InTurn()) as runner:
        for plan in steps[:3]:
            runner.execute(plan).result()
        edits, redraw = runner._drawing._edits, runner._drawing._redraw
        monkeypatch.setattr(runner._drawing, "_redraw", lambda *args: (drawn.append(args[0]), redraw(*args)))
        monkeypatch.setattr(SteadyRows, "_made", None)
        for plan in steps[3:]:
            assert isinstance(plan.rows, SteadyRows)
            assert isinstance(runner.execute(plan).result().rows, SteadyResults)
        assert drawn == ([[2]] * 5 if 3 in others else [])
        assert edits.places([0, 2]) == [] and edits.places([2, 3, 1]) == [1, 2]
