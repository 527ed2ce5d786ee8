"""Recorded prompt steps give what eager ones give, and disturb nobody.

A real tiny model. With a GPU: the engine's own operations and CUDA graphs. Without: the reference's operations,
Triton's interpreter for the kernels of inputs, attention and sampling, and a recorder that remembers what ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from runner_support import random_model, tiny_model, with_windows

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.cache.spec import group_layers
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Need, select_ops, select_slot_ops
from tokenspeed.kernels.triton.registered import PagedAttention
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row
from tokenspeed.runner.device_state import DeviceState
from tokenspeed.runner.kv_pool import LayerPages, allocate
from tokenspeed.runner.prefill_graphs import PrefillGraphs, num_requests
from tokenspeed.runner.slot_sampling import SlotParameters

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGE_SIZE, NUM_PAGES, NUM_SLOTS, LENGTH = 4, 60, 5, 60
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Recording:
    """A `Recorder` and its graphs: replaying runs the forward again on its recorded buffers."""

    def __init__(self) -> None:
        self.last: Callable[[], None] = lambda: None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        graph = Recording()
        yield graph
        graph.last = self.last

    def replay(self) -> None:
        self.last()


class Remembered(PrefillGraphs):
    """Tells the recorder what a replay has to do."""

    def _forward(self, *buffers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = super()._forward(*buffers)

        def again() -> None:
            for old, new in zip(kept, PrefillGraphs._forward(self, *buffers), strict=True):
                old.copy_(new)

        self._recorder.last = again
        return kept


class Bench:
    """A model with slots, pages and graphs.

    Args:
        config: of the model; None = all layers see everything.
        triton: its attention; slow through the interpreter.
    """

    def __init__(
        self, sizes: tuple[int, ...] = (8, 32), triton: bool = True, config: ModelConfig | None = None
    ) -> None:
        config = config or tiny_model("LlamaForCausalLM")
        need = Need(DEVICE, torch.float32)
        ops = select_ops(need)[0] if ON_GPU else replace(select_ops(need, only="reference")[0], recorder=Recording())
        if triton and not ON_GPU:
            ops = replace(ops, paged_attention=PagedAttention(DEVICE, pdl=False))
        assert ops.recorder is not None
        self.backend = PagedAttentionBackend(ops)
        self.model = random_model(config, ops, self.backend, seed=3)
        self.groups = [replace(g, num_pages=NUM_PAGES) for g in group_layers(self.model.cache_specs(), PAGE_SIZE)]
        self.shape = (config.num_kv_heads, config.head_dim)
        self.vocab = config.vocab_size
        self.pages = self.fresh_pages()
        self.state = DeviceState(NUM_SLOTS + 1, LENGTH, self.groups, DEVICE)
        self.parameters = SlotParameters(NUM_SLOTS + 1, DEVICE)
        slots = (select_slot_ops(need)[0], ops.recorder, self.state, self.parameters.sampling, NUM_SLOTS)
        self.graphs = Remembered(self.model, self.backend, *slots)
        with torch.inference_mode():
            self.model.bind_kv(list(self.pages))
            self.graphs.capture(sizes)

    def fresh_pages(self) -> list[LayerPages]:
        """Nothing written yet: NaN, so that reading what is not one's own shows."""
        pages = allocate(self.model.cache_specs(), self.groups, *self.shape, torch.float32, DEVICE)
        for layer in pages:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        return pages

    def admit(self, slot: int, token_ids: list[int], free: list[int]) -> None:
        """With pages for one token more, taken from `free`."""
        count = -(-(len(token_ids) + 1) // PAGE_SIZE)
        pages = tuple([free.pop() for _ in range(count)] for _ in self.groups)
        admission = Admission(slot, "r", 0, token_ids, len(token_ids), pages, GREEDY)
        self.state.admit(admission)
        self.parameters.admit(admission)

    def eager(self, rows: list[Row], pages: list[LayerPages]) -> torch.Tensor:
        """Logits of every row's last token."""
        self.model.bind_kv(list(pages))
        inputs = self.state.gather(rows)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        self.model.bind_kv(list(self.pages))
        return self.model.head(hidden[inputs.batch.query_start[1:].long() - 1])

    def recorded(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.graphs.size_for(rows)
        assert size is not None
        graph = self.graphs.graph(size)
        host = torch.full(graph.rows.shape, -1, dtype=torch.int32)
        self.graphs.fill(host, rows)
        graph.rows.copy_(host)
        graph.graph.replay()
        return graph.logits[: len(rows)].clone(), graph.token_ids[: len(rows)].clone()


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(triton=False)


def row(slot: int, start: int, num_tokens: int, samples: bool = True, is_decode: bool = False) -> Row:
    return Row(slot, start, num_tokens, ([],), samples, is_decode)


def copy_of(pages: list[LayerPages]) -> list[LayerPages]:
    """Layers that share memory share the copy."""
    copies = {layer.keys.data_ptr(): LayerPages(layer.keys.clone(), layer.values.clone()) for layer in pages}
    return [copies[layer.keys.data_ptr()] for layer in pages]


@pytest.mark.parametrize("config", [None, with_windows()], ids=["one group", "windows"])
@pytest.mark.parametrize(("triton", "num_mixes"), [(False, 12), (True, 12 if ON_GPU else 1)])
def test_random_mixes_equal_eager_steps(triton: bool, num_mixes: int, config: ModelConfig | None) -> None:
    rng = random.Random(0)
    bench = Bench(triton=triton, config=config)
    with torch.inference_mode():
        for _ in range(num_mixes):
            free = list(range(NUM_PAGES))
            rng.shuffle(free)
            for layer, fresh in zip(bench.pages, bench.fresh_pages(), strict=True):
                layer.keys.copy_(fresh.keys)
                layer.values.copy_(fresh.values)
            # Earlier context first, eagerly, then the step under test: chunks that sample and chunks that do not.
            context: list[Row] = []
            rows: list[Row] = []
            slots = rng.sample(range(NUM_SLOTS), rng.randint(1, 4))
            for slot in slots:
                start, num_tokens = rng.choice([0, 0, 3, 8]), rng.randint(1, 8)
                length = start + num_tokens + rng.choice([0, 5])
                bench.admit(slot, [rng.randrange(bench.vocab) for _ in range(length)], free)
                if start:
                    context.append(row(slot, 0, start))
                rows.append(row(slot, start, num_tokens, samples=length == start + num_tokens))
            if context:
                bench.eager(context, bench.pages)
            twin = copy_of(bench.pages)
            known = bench.state.token_ids.clone()
            expected = bench.eager(rows, twin)
            logits, token_ids = bench.recorded(rows)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert token_ids.tolist() == expected.argmax(1).tolist()
            for layer, other in zip(bench.pages, twin, strict=True):  # the last page is scratch
                torch.testing.assert_close(layer.keys[:-1], other.keys[:-1], equal_nan=True)
                torch.testing.assert_close(layer.values[:-1], other.values[:-1], equal_nan=True)
            for one, token_id in zip(rows, token_ids.tolist(), strict=True):
                if one.samples:
                    known[one.slot, one.start + one.num_tokens] = token_id
            assert torch.equal(bench.state.token_ids[:-1], known[:-1])  # the last slot is scratch


def test_which_steps_are_served(bench: Bench) -> None:
    size_for = bench.graphs.size_for
    assert size_for([row(0, 0, 8)]) == 8
    assert size_for([row(0, 0, 1)]) == 8
    assert size_for([row(0, 0, 9)]) == 32
    assert size_for([row(0, 0, 20), row(1, 4, 12)]) == 32
    assert size_for([row(0, 0, 33)]) is None
    assert size_for([row(0, 0, 8), row(1, 5, 1, is_decode=True)]) is None
    assert size_for([row(slot, 0, 2) for slot in range(5)]) == 32
    assert size_for([row(slot, 0, 2) for slot in range(6)]) is None  # more requests than slots


def test_a_graph_has_fewer_requests_than_tokens() -> None:
    """Equal numbers would pass for a decode step, one token a request."""
    assert [num_requests(size, 100) for size in (2, 3, 8, 9, 1024)] == [1, 2, 7, 8, 8]
    assert num_requests(64, 1) == 1


def test_a_small_graph_serves_one_long_request() -> None:
    small = Bench(sizes=(2,), triton=ON_GPU)
    with torch.inference_mode():
        small.admit(2, [5, 9, 11, 3], [7, 8])
        assert small.graphs.size_for([row(0, 0, 1), row(1, 0, 1)]) is None
        for start, num_tokens in ((0, 2), (2, 1), (3, 1)):
            twin = copy_of(small.pages)
            rows = [row(2, start, num_tokens)]
            expected = small.eager(rows, twin)
            logits, _ = small.recorded([replace_samples(rows[0], start == 3)])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def replace_samples(one: Row, samples: bool) -> Row:
    return Row(one.slot, one.start, one.num_tokens, one.new_pages, samples, one.is_decode)
