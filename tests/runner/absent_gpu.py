"""A Hopper GPU that is not there: models run on fake tensors, and launches are written down instead of made.

What is written is what Triton compiles anew for: constants, dtypes, alignment, and of a number that is not excluded
whether it is 1 or a multiple of 16.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tokenspeed.attention.triton import TritonAttentionBackend
from tokenspeed.cache.spec import GroupSpec, group_layers
from tokenspeed.config.model import ModelConfig
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops, select_slot_ops
from tokenspeed.kernels.slot_ops import PickedRows
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.step import Row, StepPlan
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner import device_state
from tokenspeed.runner.decode_graphs import DecodeGraphs
from tokenspeed.runner.kv_pool import allocate
from tokenspeed.runner.prefill_graphs import PrefillGraphs
from tokenspeed.runner.slot_sampling import SlotParameters

Variant = tuple[Any, ...]
CPU = torch.device("cpu")  # fake tensors of a CPU behave; the kernels do not look
SHARED_BYTES = 232448


class _Weight:
    """Zeros of a shape, as a checkpoint's tensor."""

    qtype = None

    def __init__(self, name: str, shape: tuple[int, ...], is_raw: bool) -> None:
        self.name, self.where, self.shape, self.is_raw = name, name, shape, is_raw

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=torch.uint8 if self.is_raw else dtype, device=device)


class _Recorder:
    @contextmanager
    def record(self) -> Iterator[types.SimpleNamespace]:
        yield types.SimpleNamespace(replay=lambda: None)


def variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    key: list[Any] = [kernel.__name__]
    for parameter in kernel.params:
        value = given.get(parameter.name)
        if parameter.is_constexpr:
            key.append((parameter.name, str(value)))
        elif isinstance(value, torch.Tensor):
            key.append((parameter.name, str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0))
        elif isinstance(value, int):
            key.append((parameter.name, parameter.do_not_specialize or (value == 1, value % 16 == 0)))
        else:
            key.append((parameter.name, type(value).__name__, str(getattr(value, "block_shape", ""))))
    return (*key, *sorted((name, value) for name, value in options.items() if name not in kernel.arg_names))


class AbsentGpu:
    """A model on it; `launched` is emptied by whoever reads it."""

    def __init__(self, config: ModelConfig, max_num_seqs: int, max_model_len: int) -> None:
        self.launched: set[Variant] = set()
        self._scratch_slot, self._vocab_size = max_num_seqs, config.vocab_size
        config = msgspec.structs.replace(config, max_position=max_model_len)
        ops, _ = select_ops(Need(torch.device("cuda"), torch.bfloat16))
        self._ops = ops = replace(ops, device=CPU)
        self._slot_ops, _ = select_slot_ops(Need(torch.device("cuda"), torch.bfloat16))
        self._backend = TritonAttentionBackend(ops)
        scheme = scheme_for(config, ops)
        moe = None
        if config.moe is not None:
            moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
        self.model = build_model(config, SINGLE, scheme, ops, self._backend, moe)
        rules, raw = self.model.load_rules(), self.model.raw_names()
        for name, shape in self.model.expected_shapes().items():
            rules[name](_Weight(name, shape, name in raw))  # type: ignore[arg-type]
        self.model.finish()
        specs = self.model.cache_specs()
        self.groups: list[GroupSpec] = [replace(group, num_pages=64) for group in group_layers(specs, 64)]
        pool = allocate(specs, self.groups, config.num_kv_heads, config.head_dim, torch.bfloat16, CPU)
        self.model.bind_kv(list(pool))
        self._state = device_state.DeviceState(max_num_seqs + 1, max_model_len, self.groups, CPU)
        self._sampling = SlotParameters(max_num_seqs + 1, CPU).sampling

    def capture(self, decode: tuple[int, ...], prefill: tuple[int, ...]) -> None:
        slots = (self._slot_ops, _Recorder(), self._state, self._sampling, self._scratch_slot)
        parts = (self.model, self._backend, *slots)
        DecodeGraphs(*parts).capture(decode, True)
        PrefillGraphs(*parts).capture(prefill)
        for dtype in (torch.float32, torch.bfloat16):  # as `Drawing.warm_up`
            self._redraw(torch.zeros(1, self._vocab_size, dtype=dtype))

    def run(self, plan: StepPlan) -> None:
        """As `CudaModelRunner` runs rows without a graph."""
        inputs = self._state.gather(plan.rows)
        self._backend.plan(inputs.batch)
        ends, last = 0, []
        for row in plan.rows:
            ends += row.num_tokens
            if row.samples:
                last.append(ends - 1)
        wanted = torch.tensor(last, dtype=torch.int64)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, inputs.batch, wanted)
        logits = self.model.logits(hidden)
        where = torch.zeros(len(last), dtype=torch.int32)
        self._slot_ops.sample_rows(logits, where, wanted, self._sampling, self._state.token_ids)
        self._redraw(logits.bfloat16())

    def _redraw(self, logits: torch.Tensor) -> None:
        """Rows with a grammar, and rows whose logits are edited besides."""
        count = len(logits)
        words = torch.zeros(count, -(-self._vocab_size // 32), dtype=torch.int32)
        slots, places = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
        picked, drawn = PickedRows(places, slots, places), torch.zeros(count, dtype=torch.int32)
        for edited, masks in ((logits, words), (logits.float(), None)):
            again = (edited, picked, masks, self._sampling, self._state.token_ids, drawn)
            self._slot_ops.redraw_rows(*again, filters=True)

    def rows(self, *lengths: int, start: int = 0) -> StepPlan:
        rows = [Row(slot, start, length, ([],) * len(self.groups), True, False) for slot, length in enumerate(lengths)]
        return StepPlan(0, [], rows, sum(lengths))


@contextmanager
def absent_gpu(patch: pytest.MonkeyPatch, name: str = "NVIDIA H200") -> Iterator[list[Variant]]:
    """Within: torch and Triton believe in the GPU, and every launch is appended to the list."""
    launched: list[Variant] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append(variant(kernel, args, options))

    properties = types.SimpleNamespace(name=name, multi_processor_count=132, total_memory=2**37, major=9, minor=0)
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": SHARED_BYTES}),
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda *device: name)
    patch.setattr(torch.cuda, "get_device_properties", lambda *device: properties)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(triton.runtime.driver, "_active", driver)
    patch.setattr(JITFunction, "run", note)
    patch.setattr(device_state, "to_device", lambda values, dtype, device: torch.tensor(values, dtype=dtype))
    patch.setattr(FakeTensor, "__int__", lambda self: 0, raising=False)  # checks of scales
    patch.setattr(FakeTensor, "__bool__", lambda self: False, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield launched
