"""The GPU runner's own logic: with graphs of decodes and prompts and without, the same plans give the same tokens.

With a GPU this is the runner as it is. Without, `torch.cuda` is replaced by stand-ins that do everything at once, a
graph remembers the forward that was recorded, and sampling is torch's (the kernel has its own tests).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from runner_support import PAGE_SIZE, Plans, random_model, tiny_model, with_windows

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.cache.spec import group_layers
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.kernels.triton.sampling import SlotSampling
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, StepPlan, StepResult
from tokenspeed.runner import cuda_runner, grammar_rows, launched_step, slot_graphs
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.interface import Pending
from tokenspeed.runner.kv_pool import allocate
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.warm_up import warm_up_plans

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SLOTS, LENGTH, NUM_PAGES = 4, 60, 128
LLAMA = tiny_model("LlamaForCausalLM")
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Recording:
    """A `Recorder`, and its graphs: replaying runs the forward again on its recorded buffers."""

    def __init__(self) -> None:
        self.num_replays: dict[str, int] = {}
        self.last: tuple[Any, ...] = ()

    @contextlib.contextmanager
    def record(self) -> Iterator[RecordedStep]:
        graph = RecordedStep(self)
        yield graph
        graph.step = self.last


class RecordedStep:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.step: tuple[Any, ...] = ()

    def replay(self) -> None:
        forward, owner, buffers, kept = self.step
        kind = type(owner).__name__
        self._recording.num_replays[kind] = self._recording.num_replays.get(kind, 0) + 1
        for old, new in zip(kept, forward(owner, *buffers), strict=True):
            old.copy_(new)


class AtOnce:
    """A stream or an event of a device that is never behind."""

    def __init__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, _: Any) -> None: ...


class UnpinnedTorch:
    """torch, whose memory is pinned nowhere, and whose GPU is the CPU."""

    cuda = SimpleNamespace(
        Stream=AtOnce,
        Event=AtOnce,
        stream=lambda _: contextlib.nullcontext(),
        default_stream=lambda _: AtOnce(),
        current_stream=lambda _: AtOnce(),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.empty(*shape, dtype=dtype)


def masked_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Stands for the kernel."""
    allowed = ((masks[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits[rows].masked_fill(~allowed, float("-inf"))


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sampling: SlotSampling,
    token_ids: torch.Tensor,
    pdl: bool,
) -> torch.Tensor:
    """Stands for the kernel: a draw depends on logits, seed and position alone."""
    assert not pdl
    chosen = []
    for scores, slot, position in zip(logits.float(), slots.tolist(), positions.tolist(), strict=True):
        temperature = float(sampling.temperature[slot])
        if temperature > 0:
            generator = torch.Generator().manual_seed(1000 * int(sampling.seed[slot]) + position)
            scores = scores / temperature - torch.rand(scores.shape, generator=generator).log().neg().log()
        chosen.append(-1 if scores.isnan().any() else int(scores.argmax()))
        token_ids[slot, position] = max(chosen[-1], 0)
    return torch.tensor(chosen, dtype=torch.int32)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    if ON_GPU:
        return recording
    monkeypatch.setattr(cuda_runner, "torch", UnpinnedTorch())
    monkeypatch.setattr(launched_step, "torch", UnpinnedTorch())
    monkeypatch.setattr(grammar_rows, "torch", UnpinnedTorch())
    monkeypatch.setattr(cuda_runner, "masked_rows", masked_rows)
    monkeypatch.setattr(cuda_runner, "has_pdl", lambda device: False)
    for module in (cuda_runner, slot_graphs):
        monkeypatch.setattr(module, "sample_rows", sample_rows)
    for kind in (DecodeGraphs, PrefillGraphs):

        def remember(self: Any, *buffers: Any, forward: Any = kind._forward) -> Any:
            kept = forward(self, *buffers)
            recording.last = (forward, self, buffers, kept)
            return kept

        monkeypatch.setattr(kind, "_forward", remember)
    return recording


@contextlib.contextmanager
def opened(
    graphs: GraphPlan, recording: Recording, config: ModelConfig = LLAMA, grammars: Any = None
) -> Iterator[CudaModelRunner]:
    """A runner that has recorded its graphs."""
    need = Need(DEVICE, torch.float32)
    ops = select_ops(need)[0] if ON_GPU else replace(select_ops(need, only="reference")[0], recorder=recording)
    backend = PagedAttentionBackend(ops)
    model = random_model(config, ops, backend, seed=7)
    groups = [replace(group, num_pages=NUM_PAGES) for group in group_layers(model.cache_specs(), PAGE_SIZE)]
    shape = (config.num_kv_heads, config.head_dim)
    model.bind_kv(list(allocate(model.cache_specs(), groups, *shape, torch.float32, DEVICE)))
    loaded = LoadedModel(model, ops, backend, [])
    runner = CudaModelRunner(loaded, groups, Limits(SLOTS, LENGTH, config.vocab_size), graphs, grammars)
    try:
        runner.capture()
        yield runner
    finally:
        runner.close()


def run(
    plans: list[StepPlan],
    graphs: GraphPlan,
    recording: Recording,
    config: ModelConfig = LLAMA,
    grammars: Any = None,
) -> tuple[list[list[RowResult]], list[str]]:
    """Results of plans, as rows, and the runner's report. All are queued at once: a plan for which there is no pinned
    buffer waits (without that, another step's tokens came now and then)."""
    with opened(graphs, recording, config, grammars) as runner:
        queued: list[Pending[StepResult]] = [runner.execute(plan) for plan in plans]
        return [pending.result().rows for pending in queued], runner.report


def random_plans(seed: int, num_groups: int = 1) -> list[StepPlan]:
    """Prompts that arrive while others decode, in chunks, some asking for logprobs or prompt logprobs."""
    rng = random.Random(seed)
    plans = Plans(NUM_PAGES, num_groups=num_groups)
    wishes = [
        GREEDY,
        SamplingParams(temperature=0.7, top_p=0.9, seed=5),
        SamplingParams(temperature=0.0, logprobs=2, seed=0),
    ]
    prompts: dict[int, int] = {}
    steps = []
    started: set[int] = set()
    for _ in range(14):
        admissions, rows = [], [plans.decode(slot) for slot in sorted(started)]
        for slot in range(SLOTS):
            if slot not in prompts and rng.random() < 0.4:
                length = rng.randint(1, 20)
                sampling = rng.choice(wishes)
                if rng.random() < 0.15:
                    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, seed=0)
                admissions.append(plans.admit(slot, [rng.randrange(LLAMA.vocab_size) for _ in range(length)], sampling))
                prompts[slot] = length
        for slot, left in list(prompts.items()):
            if slot in started or rng.random() < 0.3:
                continue
            chunk = rng.randint(1, left)
            prompts[slot] -= chunk
            rows.append(plans.row(slot, chunk, samples=prompts[slot] == 0))
            if prompts[slot] == 0:
                started.add(slot)
        if rows:
            steps.append(plans.step(admissions, rows))
        else:
            for admission in admissions:  # an admission travels with a step
                del prompts[admission.slot]
    return steps


def tokens(results: list[list[RowResult]]) -> list[list[tuple[int, list[int], str | None]]]:
    return [[(row.slot, row.token_ids, row.error) for row in rows] for rows in results]


@pytest.mark.parametrize("seed", range(8))
def test_graphs_change_nothing(seed: int, recording: Recording) -> None:
    check_graphs(random_plans(seed), recording, LLAMA)


@pytest.mark.parametrize("seed", range(4))
def test_graphs_change_nothing_with_two_cache_groups(seed: int, recording: Recording) -> None:
    check_graphs(random_plans(seed, num_groups=2), recording, with_windows())


def check_graphs(plans: list[StepPlan], recording: Recording, config: ModelConfig) -> None:
    eager, report = run(plans, GraphPlan(), recording, config)
    assert [line.partition(":")[2] for line in report] == [
        " none, decode steps run eagerly",
        " none, prompts run eagerly",
    ]
    graphs = GraphPlan(
        sizes=(1, 2, 4),
        prefill_sizes=(4, 16),
        warm_up=tuple(warm_up_plans(SLOTS, LENGTH, 20, PAGE_SIZE, len(plans[0].rows[0].new_pages))),
    )
    recorded, report = run(plans, graphs, recording, config)
    assert tokens(recorded) == tokens(eager)
    assert [row.prompt_logprobs != [] for rows in recorded for row in rows] == [
        row.prompt_logprobs != [] for rows in eager for row in rows
    ]
    assert report == [
        "decode graphs: 3 sizes up to 4 rows",
        "prefill graphs: 2 sizes up to 16 tokens of at most 8 requests",
    ]
    assert ON_GPU or min(recording.num_replays[kind.__name__] for kind in (DecodeGraphs, PrefillGraphs)) > 0


def test_a_backend_that_cannot_be_recorded(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedAttentionBackend, "can_record", False)
    plans = random_plans(0)
    _, report = run(plans, GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16)), recording)
    assert report == [
        "decode graphs: none, decode steps run eagerly (paged attention cannot be recorded)",
        "prefill graphs: none, prompts run eagerly (paged attention cannot be recorded)",
    ]
    assert not recording.num_replays


class InTurn:
    """A grammar, its compiler and its matcher: the n-th token of the output is n modulo 3; other than `stuck`, at
    which the library gives up."""

    num_bytes = 0

    def __init__(self, stuck: int | None = None) -> None:
        self._stuck = stuck
        self._num_tokens = 0
        self.is_terminated = False
        self.failure: str | None = None

    def compiled(self, spec: GrammarSpec) -> InTurn:
        return InTurn(int(spec.text) if spec.text else None)

    def matcher(self) -> InTurn:
        return self

    def fill(self, row: Any) -> bool:
        row[:] = 0
        words = row.view("uint32")
        for token_id in range(self._num_tokens % 3, LLAMA.vocab_size, 3):
            words[token_id // 32] |= 1 << token_id % 32
        return True

    def accept(self, token_id: int) -> bool:
        if self._num_tokens == self._stuck:
            self.failure = "stuck"
        is_allowed = token_id % 3 == self._num_tokens % 3
        self._num_tokens += 1
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens

    def close(self) -> None: ...


CONSTRAINED = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    "with logprobs": SamplingParams(temperature=0.0, logprobs=2, seed=0),
    "with penalties": SamplingParams(temperature=0.9, top_k=20, frequency_penalty=0.5, logprobs=1, seed=3),
}


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


BOTH_WAYS = pytest.mark.parametrize("graphs", [GraphPlan(), GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16))])


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


@pytest.mark.skipif(not ON_GPU, reason="a processor is never behind itself")
def test_launching_waits_for_nothing(recording: Recording) -> None:
    """Whatever rows ask for. (Results wait, by design.)"""
    made = Plans(NUM_PAGES)
    wishes = [
        SamplingParams(temperature=0.0, logprobs=2, seed=0),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, seed=2, logit_bias={3: 1.0}, presence_penalty=0.5,
                       repetition_penalty=1.1, min_tokens=5),
        SamplingParams(temperature=0.9, frequency_penalty=0.5, seed=3),
    ]  # fmt: skip
    first = [made.admit(slot, [5, 9, 2], wanted) for slot, wanted in enumerate(wishes)]
    first[2] = replace(first[2], banned_token_ids=(4,), grammar=GrammarSpec(kind="regex", text=""))
    first[0] = replace(first[0], grammar=GrammarSpec(kind="regex", text=""))
    steps = [made.step(first, [made.row(slot, 3, samples=True) for slot in range(SLOTS)])]
    steps += [made.step([], [made.decode(slot) for slot in range(SLOTS)]) for _ in range(20)]
    graphs = GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16))
    with opened(graphs, recording, grammars=InTurn()) as runner:
        before: list[Pending[StepResult]] = []
        for plan in steps:
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending = runner.execute(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for earlier in before:
                assert all(row.error is None for row in earlier.result().rows)
            before = [pending]
        assert len(before[0].result().rows) == SLOTS


@BOTH_WAYS
@pytest.mark.parametrize("how", CONSTRAINED)
def test_constrained_rows_follow_and_others_do_not_notice(how: str, graphs: GraphPlan, recording: Recording) -> None:
    """Slot 1 has a grammar, slots 0 and 2 have none; slot 2 arrives late, so that steps are mixed."""

    def plans(grammar: GrammarSpec | None) -> list[StepPlan]:
        made = Plans(NUM_PAGES)
        prompts = {0: [5, 9, 2], 1: [7, 7, 1, 4], 2: [3] * 6}
        first = [
            made.admit(0, prompts[0], GREEDY),
            replace(made.admit(1, prompts[1], CONSTRAINED[how]), grammar=grammar),
        ]
        steps = [made.step(first, [made.row(0, 3, samples=True), made.row(1, 4, samples=True)])]
        steps += [made.step([], [made.decode(0), made.decode(1)]) for _ in range(4)]
        late = made.admit(2, prompts[2], CONSTRAINED["drawn"])
        steps.append(made.step([late], [made.decode(0), made.decode(1), made.row(2, 6, samples=True)]))
        steps += [made.step([], [made.decode(slot) for slot in range(3)]) for _ in range(4)]
        return steps

    spec = GrammarSpec(kind="regex", text="")
    free, _ = run(plans(None), graphs, recording)
    held, _ = run(plans(spec), graphs, recording, grammars=InTurn())
    ours = [row.token_ids[0] % 3 for rows in held for row in rows if row.slot == 1]
    assert ours == [place % 3 for place in range(10)]
    without = [[row.token_ids[0] % 3 for row in rows if row.slot == 1] for rows in free]
    assert without != [[place % 3] for place in range(10)], "the model does so anyway"
    for slot in (0, 2):
        theirs = [[row.token_ids for row in rows if row.slot == slot] for rows in held]
        assert theirs == [[row.token_ids for row in rows if row.slot == slot] for rows in free]


def test_a_grammar_that_gives_up_ends_its_own_row(recording: Recording) -> None:
    made = Plans(NUM_PAGES)
    spec = GrammarSpec(kind="regex", text="1")
    first = [made.admit(0, [5, 9], GREEDY), replace(made.admit(1, [7, 1], GREEDY), grammar=spec)]
    steps = [made.step(first, [made.row(0, 2, samples=True), made.row(1, 2, samples=True)])]
    steps += [made.step([], [made.decode(0), made.decode(1)]) for _ in range(3)]
    results, _ = run(steps, GraphPlan(sizes=(1, 2, 4)), recording, grammars=InTurn())
    faults = [[row.error for row in rows if row.slot == 1] for rows in results]
    assert faults[:2] == [[None], [None]]
    assert faults[2:] == [["the grammar cannot be followed: stuck"]] * 2
    assert all(row.error is None and len(row.token_ids) == 1 for rows in results for row in rows if row.slot == 0)


def test_a_launch_that_fails_fails_its_own_result(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_plans(0)[:2]
    (expected,), _ = run([first], GraphPlan(), recording)
    with opened(GraphPlan(), recording) as runner:
        before = runner.execute(first)

        def fail(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(runner, "_launch", fail)
        after = runner.execute(second)
        assert tokens([before.result().rows]) == tokens([expected])
        with pytest.raises(RuntimeError, match="the device is gone"):
            after.result()


def test_the_thread_is_as_it_was_once_a_runner_is_closed(recording: Recording) -> None:
    with opened(GraphPlan(), recording):
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    if ON_GPU:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def _full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 is full")


def test_a_step_without_memory_names_bytes_and_flags(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its kind: what filled the GPU may have been another process."""
    plan, after = random_plans(0)[:2]
    with opened(GraphPlan(), recording) as runner:
        runner.execute(plan).result()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
        monkeypatch.setattr(runner, "_launch", _full)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            runner.execute(after).result()
    for part in ("running a step", "3.00 GiB needed", "1.00 GiB of 80.00 GiB free", "--gpu-memory-utilization"):
        assert part in str(raised.value), str(raised.value)
    assert "--max-num-seqs" in str(raised.value)


@pytest.mark.parametrize("where", ["_record", "_launch"])
def test_recording_without_memory_names_bytes_and_flags(
    where: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
    monkeypatch.setattr(CudaModelRunner, where, _full)
    warm_up = tuple(random_plans(0)[:1])
    with pytest.raises(ConfigError) as raised, opened(GraphPlan((1, 2), warm_up=warm_up), recording):
        pass
    for part in ("recording steps", "3.00 GiB needed", "1.00 GiB of 80.00 GiB free", "--max-cudagraph-capture-size"):
        assert part in str(raised.value), str(raised.value)
    assert "--enforce-eager" in str(raised.value)
