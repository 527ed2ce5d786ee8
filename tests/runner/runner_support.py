"""A model without weights: the hidden state of a token is its one-hot history, so a test can say what every step must
compute. It reads and writes the KV pool through the batch, as a real model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from memory_weight import MemoryWeight

from tokenspeed.attention.interface import AttentionBatch, LayerKV
from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.cache.spec import GroupSpec, LayerCacheSpec, group_layers
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.ops import GraphUnsupported, Ops, Recorder
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.interface import LoadRule, Model
from tokenspeed.models.registry import build_model, examples
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, SteadyRows, SteadySet, StepPlan
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.kv_pool import allocate
from tokenspeed.runner.loaded import LoadedModel
from tokenspeed.runner.model_runner import MAX_GRAPH_ROWS, Limits, ModelRunner

CPU = torch.device("cpu")
VOCAB = 50
PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


class SumModel:
    """Keys are token ids; the next token is (sum of the sequence's tokens) mod (VOCAB - 1), logit 5 against 0.

    A token `poison` makes the logits of every later position of its sequence NaN.
    """

    def __init__(self, poison: int = VOCAB - 1) -> None:
        self.poison = poison
        self.num_forwards = 0
        self.forward_sizes: list[int] = []
        self._kv: LayerKV | None = None

    def load_rules(self) -> dict[str, LoadRule]:
        return {}

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def ignorable(self, name: str) -> bool:
        return True

    def finish(self) -> None: ...

    def cache_specs(self) -> list[LayerCacheSpec]:
        return [LayerCacheSpec(layer=0, group="full", kind="full", bytes_per_token=8)]

    def bind_kv(self, pool: list[LayerKV]) -> None:
        (self._kv,) = pool

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, 2]: the sum of the sequence up to the token, and 1 where it holds the poison."""
        assert self._kv is not None
        self.num_forwards += 1
        self.forward_sizes.append(len(token_ids))
        keys = self._kv.keys.view(-1)
        keys[batch.slots] = token_ids.float()
        rows = []
        for request in range(batch.num_requests):
            start, end = int(batch.query_start[request]), int(batch.query_start[request + 1])
            length = int(batch.seq_lens[request])
            where = torch.arange(length)
            pages = batch.page_table[request].long()[where // PAGE_SIZE]
            known = keys[pages * PAGE_SIZE + where % PAGE_SIZE]
            sums, poisoned = known.cumsum(0), (known == self.poison).cumsum(0).clamp(max=1)
            first = length - (end - start)
            assert positions[start:end].tolist() == list(range(first, length))
            rows.append(torch.stack([sums[first:], poisoned[first:].float()], dim=1))
        hidden = torch.cat(rows)
        return hidden if wanted is None else hidden[wanted]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(hidden.shape[0], VOCAB)
        logits.scatter_(1, (hidden[:, :1].long() % (VOCAB - 1)), 5.0)
        logits[hidden[:, 1] > 0] = torch.nan
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()


@dataclass
class LateTape:
    """Records by remembering what was called; the recorded results are NaN until the first replay."""

    limit: int
    recorded: list[int] = field(default_factory=list)
    model: SumModel | None = None
    num_replays: int = 0

    @contextmanager
    def record(self) -> Iterator[LateGraph]:
        assert self.model is not None
        graph = LateGraph(self)
        forward, head = self.model.forward, self.model.head

        def keep_inputs(token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
            if len(token_ids) > self.limit:
                raise GraphUnsupported(f"more than {self.limit} rows")
            graph.step = lambda: head(forward(token_ids, positions, batch))
            return torch.empty(len(token_ids), 2)

        def keep_head(hidden: torch.Tensor) -> torch.Tensor:
            graph.out = torch.full((hidden.shape[0], VOCAB), torch.nan)
            return graph.out

        self.model.forward, self.model.head = keep_inputs, keep_head  # type: ignore[method-assign]
        try:
            yield graph
        finally:
            del self.model.forward, self.model.head
        self.recorded.append(graph.out.shape[0])


class LateGraph:
    """See `LateTape`."""

    def __init__(self, tape: LateTape) -> None:
        self._tape = tape
        self.step: Any = None
        self.out = torch.empty(0)

    def replay(self) -> None:
        self._tape.num_replays += 1
        self.out.copy_(self.step())


def tiny_model(architecture: str) -> ModelConfig:
    """The example of a family."""
    return next(example for example in examples() if example.architecture == architecture)


def engine_config(model: ModelConfig, **changes: object) -> EngineConfig:
    """Random weights, pages of 4."""
    config = EngineConfig(
        model=model,
        checkpoint=Checkpoint(name="tiny", format="config", config_path="-", weight_files=(), tokenizer_path="-"),
        load_format="dummy",
        device="cpu",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=MAX_GRAPH_ROWS + 4,
        max_num_batched_tokens=512,
        page_size=4,
        num_pages=300,
        kv_memory_bytes=None,
        enable_prefix_caching=False,
        enable_overlap=False,
        enforce_eager=False,
        schedule_policy="fifo",
        attention_backend="auto",
        num_threads=1,
        seed=3,
        max_queue_len=1,
    )
    return msgspec.structs.replace(config, **changes)


def with_windows() -> ModelConfig:
    """Layers of two cache groups, the first of which sees six tokens."""
    return msgspec.structs.replace(tiny_model("LlamaForCausalLM"), layer_windows=(6, None))


def random_model(config: ModelConfig, ops: Ops, backend: PagedAttentionBackend, seed: int) -> Model:
    """A model with random weights, the same for the same seed on every device."""
    scheme = scheme_for(config, ops)
    moe = None
    if config.moe is not None:
        moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
    model = build_model(config, SINGLE, scheme, ops, backend, moe)
    generator = torch.Generator().manual_seed(seed)
    for name, rule in model.load_rules().items():
        rule(MemoryWeight(name, torch.randn(model.expected_shapes()[name], generator=generator) * 0.3))
    model.finish()
    return model


def plain_ops() -> Ops:
    """The reference, without a recorder."""
    return replace(select_ops(Need(CPU, torch.float32), only="reference")[0], recorder=None)


def with_recorder(ops: Ops, recorder: Recorder) -> Ops:
    return replace(ops, recorder=recorder)


def sum_runner(
    *,
    num_pages: int = 32,
    max_num_seqs: int = 6,
    max_model_len: int = 40,
    recorder: LateTape | None = None,
    enforce_eager: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[ModelRunner, SumModel]:
    """A runner over `SumModel`, whose unwritten pages hold NaN. `dtype`: what the runner takes the model for."""
    model = SumModel()
    ops = replace(plain_ops(), dtype=dtype)
    if recorder is not None:
        recorder.model = model
        ops = with_recorder(ops, recorder)
    groups: list[GroupSpec] = [replace(group, num_pages=num_pages) for group in group_layers(model.cache_specs(), 4)]
    pages = allocate(model.cache_specs(), groups, 1, 1, torch.float32, CPU)
    for layer in pages:
        layer.keys.fill_(torch.nan)
    model.bind_kv(list(pages))
    loaded = LoadedModel(model, ops, PagedAttentionBackend(ops), [])
    return ModelRunner(loaded, groups, Limits(max_num_seqs, max_model_len, VOCAB), enforce_eager), model


class Plans:
    """Writes the plans of a test: hands out pages to every cache group, counts steps, remembers each slot's length."""

    def __init__(self, num_pages: int = 32, order: int = 1, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._free = list(range(num_pages))[::order]
        self._step_id = 0
        self._num_pages: dict[int, int] = {}
        self.lens: dict[int, int] = {}

    def admit(self, slot: int, token_ids: list[int], sampling: SamplingParams = GREEDY, **fields: Any) -> Admission:
        """An admission with the pages of all its tokens."""
        count = -(-len(token_ids) // PAGE_SIZE)
        pages = self._take(count)
        self._num_pages[slot], self.lens[slot] = count, 0
        prompt_len = fields.pop("prompt_len", len(token_ids))
        return Admission(slot, f"r{slot}", 0, list(token_ids), prompt_len, pages, sampling, **fields)

    def row(self, slot: int, num_tokens: int, samples: bool = True, is_decode: bool = False) -> Row:
        """The next tokens of a slot, with the page they need if it is not there yet."""
        start = self.lens[slot]
        self.lens[slot] = start + num_tokens
        missing = -(-self.lens[slot] // PAGE_SIZE) - self._num_pages[slot]
        new = self._take(max(0, missing))
        self._num_pages[slot] += len(new[0])
        return Row(slot, start, num_tokens, new, samples, is_decode)

    def _take(self, count: int) -> tuple[list[int], ...]:
        return tuple([self._free.pop() for _ in range(count)] for _ in range(self._num_groups))

    def decode(self, slot: int) -> Row:
        return self.row(slot, 1, is_decode=True)

    def step(self, admissions: list[Admission], rows: list[Row]) -> StepPlan:
        self._step_id += 1
        return StepPlan(self._step_id, admissions, rows, sum(row.num_tokens for row in rows))


def next_sums(prompt: list[int], count: int) -> list[int]:
    """What `SumModel` says, greedy."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % (VOCAB - 1))
    return tokens[len(prompt) :]


def as_columns(plans: list[StepPlan]) -> list[StepPlan]:
    """The same plans; where one only goes on decoding what the plan before decoded, its rows are columns."""
    given: list[StepPlan] = []
    before: list[Row] = []
    members, age = SteadySet((), (), ()), 0
    for plan in plans:
        rows = list(plan.rows)
        goes_on = not plan.admissions and [(row.slot, row.start - 1) for row in rows] == [
            (row.slot, row.start) for row in before
        ]
        if goes_on and all(row.is_decode for row in rows + before):
            if age == 0:
                slots, starts = tuple(row.slot for row in rows), tuple(row.start for row in rows)
                members = SteadySet(slots, starts, tuple([] for _ in rows[0].new_pages))
            new_pages = {place: row.new_pages for place, row in enumerate(rows) if any(row.new_pages)}
            given.append(StepPlan(plan.step_id, [], SteadyRows(members, age, new_pages), plan.num_tokens))
            assert list(given[-1].rows) == rows
            age += 1
        else:
            given.append(plan)
            age = 0
        before = rows
    return given
