"""A decode step can be recorded: between the ops of a forward there are only views.

A tape of Python calls stands for a recorder; recorders that exist on this machine are tested the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from memory_weight import MemoryWeight
from model_harness import Pages

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.ops import ExpertKernels, GraphUnsupported, Ops, Route
from tokenspeed.kernels.registry import Need, discover, select_ops
from tokenspeed.models.interface import Model
from tokenspeed.models.registry import build_model, examples
from tokenspeed.moe.interface import ExpertWeights, MoeNeed, Routing
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.quantization.select import scheme_for

CPU = torch.device("cpu")
EXAMPLES = {example.architecture: example for example in examples()}
NUM_ROWS, PAGE_SIZE, CONTEXT = 3, 4, 11


class Tape:
    """Runs each op once while recording, but hands on NaN: whatever is computed outside of ops is lost."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._recording = False

    def replay(self) -> None:
        for call in self._calls:
            call()

    @contextmanager
    def record(self) -> Iterator[Tape]:
        self._recording = True
        yield self
        self._recording = False

    def wrap(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """An op whose result is a tensor, or tensors in dataclasses and tuples."""

        def recorded(*arguments: Any, **named: Any) -> Any:
            result = op(*arguments, **named)
            if not self._recording:
                return result
            kept = _lost(result)
            self._calls.append(lambda: _copy(op(*arguments, **named), kept))
            return kept

        return recorded


def _lost(result: Any) -> Any:
    """The same shape of result with nothing in it: NaN, and -1 where numbers are whole."""
    if isinstance(result, torch.Tensor):
        return torch.full_like(result, torch.nan if result.is_floating_point() else -1)
    x, routing = result
    return _lost(x), Routing(_lost(routing.expert_ids), _lost(routing.weights))


def _copy(result: Any, kept: Any) -> None:
    if isinstance(result, torch.Tensor):
        kept.copy_(result)
        return
    kept[0].copy_(result[0])
    kept[1].expert_ids.copy_(result[1].expert_ids)
    kept[1].weights.copy_(result[1].weights)


class TapedExperts:
    """`ops.ExpertKernels` whose experts are recorded."""

    def __init__(self, kernels: ExpertKernels, tape: Tape) -> None:
        self._kernels, self._tape = kernels, tape

    def why_not(self, need: MoeNeed) -> str | None:
        return self._kernels.why_not(need)

    def pack(self, weights: ExpertWeights, need: MoeNeed) -> Any:
        experts = self._kernels.pack(weights, need)
        run = self._tape.wrap(experts)

        class Recorded:
            max_fused_rows = experts.max_fused_rows

            def __call__(self, *arguments: Any) -> Any:
                return run(*arguments)

        return Recorded()


class TapedRoute:
    """`ops.Route`, recorded."""

    def __init__(self, route: Route, tape: Tape) -> None:
        self.max_fused_rows = route.max_fused_rows
        self._run = tape.wrap(route)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(*arguments, **named)


def with_tape(ops: Ops) -> tuple[Ops, Tape]:
    tape = Tape()
    not_ops = (
        "device",
        "dtype",
        "kv_dtype",
        "block_linear",
        "recorder",
        "fused_linear",
        "fp8_linear",
        "route",
        "experts",
    )
    wrapped = {f.name: tape.wrap(getattr(ops, f.name)) for f in fields(ops) if f.name not in not_ops}
    assert ops.route is not None and ops.experts is not None
    sparse = {"route": TapedRoute(ops.route, tape), "experts": TapedExperts(ops.experts, tape)}
    return replace(ops, **wrapped, **sparse, recorder=tape), tape


def build(config: ModelConfig, ops: Ops) -> Model:
    scheme, moe = scheme_for(config, ops), None
    if config.moe is not None:
        moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
    model = build_model(config, SINGLE, scheme, ops, PagedAttentionBackend(ops), moe)
    generator = torch.Generator().manual_seed(1)
    for name, rule in model.load_rules().items():
        rule(MemoryWeight(name, torch.randn(model.expected_shapes()[name], generator=generator) * 0.2))
    model.finish()
    return model


def pool(config: ModelConfig, dtype: torch.dtype) -> list[Pages]:
    """Nine pages, three a row, with the same random keys and values each time."""
    generator = torch.Generator().manual_seed(2)
    shape = (9, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    return [
        Pages(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))) for _ in range(config.num_layers)
    ]


def decode_batch() -> AttentionBatch:
    """As the runner's static batch: no host twins, a table wider than needed."""
    table = torch.zeros(NUM_ROWS, 5, dtype=torch.int32)
    table[:, :3] = torch.tensor([[4, 0, 7], [2, 8, 1], [6, 3, 5]])
    lens = torch.tensor([CONTEXT, 5, 9])
    last = lens - 1
    pages = table.gather(1, (last // PAGE_SIZE)[:, None]).squeeze(1).long()
    return AttentionBatch(
        query_start=torch.arange(NUM_ROWS + 1, dtype=torch.int32),
        seq_lens=lens.int(),
        page_table=table,
        slots=pages * PAGE_SIZE + last % PAGE_SIZE,
        num_requests=NUM_ROWS,
        num_tokens=NUM_ROWS,
    )


def check(config: ModelConfig, ops: Ops, tolerance: float) -> None:
    """Record, then replay with other tokens; equal to the eager step."""
    model, batch = build(config, ops), decode_batch()
    batch.other_groups = (decode_batch(),)
    ids, positions = torch.tensor([1, 2, 3]), batch.seq_lens.long() - 1
    with torch.inference_mode():
        model.bind_kv(pool(config, ops.dtype))
        eager = model.head(model.forward(torch.tensor([5, 77, 0]), positions, batch))
        eager = eager.clone()
        model.bind_kv(pool(config, ops.dtype))
        assert ops.recorder is not None
        with ops.recorder.record() as graph:
            head = model.head(model.forward(ids, positions, batch))
        ids.copy_(torch.tensor([5, 77, 0]))
        for _ in range(2):  # a replay leaves nothing behind that changes the next
            graph.replay()
            assert float((head - eager).float().norm() / eager.float().norm()) < tolerance


@pytest.mark.parametrize("architecture", EXAMPLES)
def test_only_ops_between_ops(architecture: str) -> None:
    ops, _ = select_ops(Need(CPU, torch.float32), only="torch_cpu")
    recordable, _ = with_tape(ops)
    check(EXAMPLES[architecture], recordable, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", EXAMPLES)
@pytest.mark.parametrize("recorder", sorted({found.name for found in discover() if found.op == "recorder"}))
def test_recorders_of_this_machine(recorder: str, architecture: str, dtype: torch.dtype) -> None:
    ops, report = select_ops(Need(CPU, dtype), only=recorder)
    if ops.recorder is None:
        pytest.skip("; ".join(line for line in report if line.startswith(("embedding", "recorder"))))
    config = EXAMPLES[architecture]
    if config.moe is not None:
        # Which experts are hit is known on the host only: the runner runs such a model's steps one by one.
        with pytest.raises(GraphUnsupported, match="cannot be recorded"):
            check(config, ops, 0.0)
        return
    check(config, ops, 1e-5 if dtype == torch.float32 else 1e-2)
