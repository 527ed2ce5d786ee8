"""A GPU runner to test, with stand-ins where there is no GPU: streams and copies are those of `late_device`, a graph
remembers the forward that was recorded, and every kernel is the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_device import LateDevice, late_device
from runner_support import PAGE_SIZE, random_model, tiny_model

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.cache.spec import group_layers
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Need, select_ops, select_slot_ops
from tokenspeed.kernels.slot_ops import SlotOps
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, StepPlan, StepResult
from tokenspeed.runner.cuda_runner import CudaModelRunner, GraphPlan
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.interface import Pending
from tokenspeed.runner.kv_pool import allocate
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.model_runner import Limits
from tokenspeed.runner.prefill_graphs import PrefillGraphs

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SLOTS, LENGTH, NUM_PAGES = 4, 60, 128
LLAMA = tiny_model("LlamaForCausalLM")
GREEDY = SamplingParams(temperature=0.0, seed=0)
BOTH_WAYS = pytest.mark.parametrize("graphs", [GraphPlan(), GraphPlan(sizes=(1, 2, 4), prefill_sizes=(4, 16))])


class Recording:
    """A `Recorder`, and its graphs: replaying runs the forward again on its recorded buffers.

    Fields:
        device: where there is no GPU, who stands for it.
    """

    device: LateDevice

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


@pytest.fixture(name="recording")
def recording_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    recording = Recording()
    if ON_GPU:
        yield recording
        return
    for kind in (DecodeGraphs, PrefillGraphs):

        def remember(self: Any, *buffers: Any, forward: Any = kind._forward) -> Any:
            kept = forward(self, *buffers)
            recording.last = (forward, self, buffers, kept)
            return kept

        monkeypatch.setattr(kind, "_forward", remember)
    with late_device(monkeypatch) as recording.device:
        yield recording


def slot_ops() -> SlotOps:
    return select_slot_ops(Need(DEVICE, torch.float32))[0]


@contextlib.contextmanager
def opened(
    graphs: GraphPlan,
    recording: Recording,
    config: ModelConfig = LLAMA,
    grammars: Any = None,
    on_slots: SlotOps | None = None,
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
    limits = Limits(SLOTS, LENGTH, config.vocab_size)
    runner = CudaModelRunner(loaded, on_slots or slot_ops(), groups, limits, graphs, grammars)
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
