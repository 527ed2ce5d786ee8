"""Every implementation of every operation against the reference: fresh random inputs, poisoned outputs, shape classes.

Parametrised over `registry.discover()` and the devices at hand, so a new kernel file is tested without an edit here,
and on a machine with a GPU its implementations are too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attention_cases import attention_case

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference import attention as reference_attention
from tokenspeed.kernels.reference import pointwise
from tokenspeed.kernels.registry import OPTIONAL, REQUIRED, SLOT_OPS, Implementation, Need, discover

CPU = torch.device("cpu")
HERE = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
"""The devices at hand. On a GPU kernels are compiled anew for a shape, so shapes are fewer there."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the norm of the difference: a few roundings to 24, 8 and 11 bits."""
ROWS = (1, 3, 8, 33)


def candidates(op: str) -> list[Any]:
    """Every implementation of an op with every need that it can serve here."""
    needs = [Need(device, dtype) for device in HERE for dtype in TOLERANCE if is_served(device, dtype)]
    return [
        pytest.param(
            implementation, need, id=f"{implementation.name}-{str(need.dtype).removeprefix('torch.')}-{need.device}"
        )
        for implementation in discover()
        for need in needs
        if implementation.op == op and implementation.why_not(need) is None
    ]


def is_served(device: torch.device, dtype: torch.dtype) -> bool:
    """No CPU engine runs in float16."""
    return dtype != torch.float16 or device.type == "cuda"


def every(op: str) -> Callable[..., Any]:
    return pytest.mark.parametrize(("implementation", "need"), candidates(op))


def made(implementation: Implementation, need: Need) -> Any:
    return implementation.make(need)


@pytest.fixture(autouse=True)
def fresh_inputs() -> Iterator[None]:
    """New random numbers each run; the seed is in the report of a failure."""
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")
    with torch.inference_mode():
        yield


def random(*shape: int, need: Need) -> torch.Tensor:
    return torch.randn(shape, device=need.device).to(need.dtype)


def poison(*shape: int, need: Need) -> None:
    """Leave freed blocks of NaN of the sizes that an op is about to allocate: a value it forgets to write shows."""
    blocks = [torch.full(shape, torch.nan, dtype=need.dtype, device=need.device) for _ in range(4)]
    del blocks


def check(ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == truth.shape
    assert ours.dtype == truth.dtype
    difference = (ours.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-9)
    assert float(difference) < TOLERANCE[dtype]


def test_every_required_op_has_a_reference_that_never_refuses() -> None:
    references = {found.op: found for found in discover() if found.name == "reference"}
    assert set(references) == {*REQUIRED, *SLOT_OPS, "route", "experts"}
    assert all(found.why_not(Need(torch.device("meta"), torch.float16)) is None for found in references.values())


@pytest.mark.parametrize("found", discover(), ids=lambda found: f"{found.op}-{found.name}")
def test_an_implementation_serves_or_says_why_not(found: Implementation) -> None:
    assert found.op in REQUIRED + OPTIONAL + SLOT_OPS
    for device in (*HERE, torch.device("meta")):
        for dtype in (*TOLERANCE, torch.float64):
            reason = found.why_not(Need(device, dtype))
            assert reason is None or len(reason.split()) > 2, "a reason in words"
    assert found.name == "reference" or found.why_not(Need(torch.device("meta"), torch.bfloat16)) is not None


@every("embedding")
def test_embedding(implementation: Implementation, need: Need) -> None:
    table = random(77, 48, need=need)
    for rows in ROWS:
        ids = torch.randint(0, 77, (rows,), device=need.device)
        ids[0] = 76
        poison(rows, 48, need=need)
        assert torch.equal(made(implementation, need)(ids, table), pointwise.embedding(ids, table))


@every("linear")
@pytest.mark.parametrize("shape", [(64, 96), (576, 192), (80, 50), (33, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(implementation: Implementation, need: Need, shape: tuple[int, int], has_bias: bool) -> None:
    weight = random(shape[1], shape[0], need=need)
    bias = random(shape[1], need=need) if has_bias else None
    for rows in ROWS:
        x = random(rows, shape[0], need=need)
        poison(rows, shape[1], need=need)
        check(made(implementation, need)(x, weight, bias), pointwise.linear(x, weight, bias), need.dtype)


@every("rms_norm")
@pytest.mark.parametrize("size", [48, 576, 70])
def test_rms_norm(implementation: Implementation, need: Need, size: int) -> None:
    for rows in ROWS:
        x, weight = random(rows, size, need=need), random(size, need=need)
        before = x.clone()
        poison(rows, size, need=need)
        check(made(implementation, need)(x, weight, 1e-5), pointwise.rms_norm(x, weight, 1e-5), need.dtype)
        assert torch.equal(x, before)


@every("rms_norm")
def test_rms_norm_of_zeros_is_zero(implementation: Implementation, need: Need) -> None:
    x, weight = torch.zeros(2, 64, dtype=need.dtype, device=need.device), random(64, need=need)
    assert not made(implementation, need)(x, weight, 1e-6).any()


@every("add_rms_norm")
@pytest.mark.parametrize("size", [48, 576, 70])
def test_add_rms_norm(implementation: Implementation, need: Need, size: int) -> None:
    for rows in ROWS:
        x, residual, weight = (random(*shape, need=need) for shape in ((rows, size), (rows, size), (size,)))
        residual_truth = residual.clone()
        truth = pointwise.add_rms_norm(x, residual_truth, weight, 1e-5)
        poison(rows, size, need=need)
        check(made(implementation, need)(x, residual, weight, 1e-5), truth, need.dtype)
        check(residual, residual_truth, need.dtype)


@every("silu_and_mul")
@pytest.mark.parametrize("size", [32, 1536, 70])
def test_silu_and_mul(implementation: Implementation, need: Need, size: int) -> None:
    for rows in ROWS:
        gate_up = random(rows, 2 * size, need=need) * 4
        truth = pointwise.silu_and_mul(gate_up.clone())
        poison(rows, size, need=need)
        check(made(implementation, need)(gate_up), truth, need.dtype)


HEADS = [(4, 2, 16), (9, 3, 64), (6, 6, 32), (8, 1, 128)]  # query heads, key heads, head_dim


@every("qkv_rope_cache")
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_rope_cache(implementation: Implementation, need: Need, heads: tuple[int, int, int], normed: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    angles = torch.rand(50, head_dim // 2, device=need.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = [random(head_dim, need=need) if normed else None for _ in range(2)]
    for rows in ROWS:
        qkv = random(rows, (num_heads + 2 * num_kv_heads) * head_dim, need=need)
        positions = torch.randint(0, 50, (rows,), device=need.device)
        slots = torch.randperm(48, device=need.device)[:rows]
        pools = [torch.full((12, 4, num_kv_heads, head_dim), torch.nan).to(need.device, need.dtype) for _ in range(4)]
        keys, values, keys_truth, values_truth = pools
        truth = pointwise.qkv_rope_cache(qkv.clone(), positions, cos_sin, keys_truth, values_truth, slots, *norms, 1e-6)
        poison(rows, num_heads, head_dim, need=need)
        q = made(implementation, need)(qkv, positions, cos_sin, keys, values, slots, *norms, 1e-6)
        check(q, truth, need.dtype)
        for ours, wanted in ((keys, keys_truth), (values, values_truth)):
            assert torch.equal(ours.isnan(), wanted.isnan()), "wrote a slot that is not its own"
            check(ours.nan_to_num(), wanted.nan_to_num(), need.dtype)


STEPS = {
    "one decode": ([1], [37]),
    "first token": ([1], [1]),
    "decodes": ([1] * 5, [1, 16, 17, 130, 64]),
    "equal decodes": ([1] * 3, [20, 20, 20]),
    "prefill": ([45], [45]),
    "chunk": ([13], [60]),
    "mixed": ([1, 20, 1, 7, 1], [33, 20, 5, 50, 90]),
    "prefill before decode": ([9, 1], [9, 40]),
}


WINDOWS = (None, 1, 7, 16, 1000)
"""All, one token, part of a page, a whole page of one size, more than any context of `STEPS`."""


def attention_truth(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    logit_cap: float | None = None,
) -> torch.Tensor:
    """One query of one head at a time, in float64 on the CPU, from what it sees and nothing else."""
    device, dtype = q.device, q.dtype
    page_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    q, keys, values, page_table = q.cpu().double(), keys.cpu().double(), values.cpu().double(), batch.page_table.cpu()
    more = torch.zeros(q.shape[1]) if sinks is None else sinks.cpu().double().exp()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for r in range(batch.num_requests):
        begin, end = (int(x) for x in batch.query_start[r : r + 2])
        for t in range(begin, end):
            position = int(batch.seq_lens[r]) - (end - t)
            seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            pages = page_table[r][seen // page_size].long()
            for h in range(q.shape[1]):
                k, v = (x[pages, seen % page_size, h // group] for x in (keys, values))
                logits = k @ q[t, h] * scale
                exponents = torch.exp(logits if logit_cap is None else logit_cap * torch.tanh(logits / logit_cap))
                out[t, h] = exponents @ v / (exponents.sum() + more[h])
    return out.flatten(1).to(device, dtype)


def some_sinks(num_heads: int, has_sinks: bool, need: Need) -> torch.Tensor | None:
    return torch.randn(num_heads, device=need.device) * 3 if has_sinks else None


@every("paged_attention")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_paged_attention(
    implementation: Implementation, need: Need, step: str, heads: tuple[int, int, int], has_sinks: bool
) -> None:
    query_lens, seq_lens = STEPS[step]
    attend = made(implementation, need)
    sinks = some_sinks(heads[0], has_sinks, need)
    everything = [(window, page_size) for window in WINDOWS for page_size in (4, 16)]
    for window, page_size in everything if need.device == CPU else [(None, 16), (7, 4), (1000, 64)]:
        q, keys, values, batch = attention_case(query_lens, seq_lens, heads, need.dtype, page_size, window, need.device)
        given = q, keys, values, batch, heads[2] ** -0.5, window, 1.0, sinks
        truth = reference_attention.paged_attention(*given)
        poison(q.shape[0], q.shape[1] * q.shape[2], need=need)
        check(attend(*given), truth, need.dtype)
        batch.query_lens_host = batch.seq_lens_host = None
        check(attend(*given), truth, need.dtype)


@every("paged_attention")
@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128])
def test_paged_attention_over_pages_of_every_size(implementation: Implementation, need: Need, page_size: int) -> None:
    """One token, the CPUs' size, one that is no power of two, the GPU's, and more than most prompts here."""
    attend = made(implementation, need)
    sinks = torch.randn(8, device=need.device)
    for window in (None, 50):
        for step in STEPS.values():
            q, keys, values, batch = attention_case(*step, (8, 2, 64), need.dtype, page_size, window, need.device)
            given = q, keys, values, batch, 0.125, window, 1.0, sinks
            truth = reference_attention.paged_attention(*given)
            poison(q.shape[0], q.shape[1] * q.shape[2], need=need)
            check(attend(*given), truth, need.dtype)


@every("paged_attention")
@pytest.mark.parametrize("window", [None, 1, 7, 16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_paged_attention_one_query_at_a_time(
    implementation: Implementation, need: Need, window: int | None, has_sinks: bool
) -> None:
    sinks = some_sinks(4, has_sinks, need)
    lens = [1, 20, 1, 7], [33, 20, 5, 50]
    q, keys, values, batch = attention_case(*lens, (4, 2, 16), need.dtype, 4, window, need.device)
    truth = attention_truth(q, keys, values, batch, 0.25, window, sinks)
    check(made(implementation, need)(q, keys, values, batch, 0.25, window, 1.0, sinks), truth, need.dtype)


@every("paged_attention")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_a_logit_cap(implementation: Implementation, need: Need, window: int | None, has_sinks: bool) -> None:
    """Logits from -8 to 8, as drawn, far beyond the cap: without it the result is another."""
    sinks = some_sinks(4, has_sinks, need)
    attend = made(implementation, need)
    for lens in (([1, 20, 1, 7], [33, 20, 5, 50]), ([1, 1, 1], [40, 3, 90]), ([30], [30])):
        q, keys, values, batch = attention_case(*lens, (4, 2, 16), need.dtype, 16, window, need.device)
        given = q, keys, values, batch, 0.5, window
        truth = attention_truth(*given, sinks, 1.5)
        poison(q.shape[0], q.shape[1] * q.shape[2], need=need)
        check(attend(*given, 1.0, sinks, 1.5), truth, need.dtype)
        check(attend(*given, 2.0, sinks, 1.5), truth * 2, need.dtype)
        other = attention_truth(*given, sinks)
        assert (other - truth).norm() > 0.1 * truth.norm(), "the cap changed nothing"


@every("paged_attention")
def test_a_sink_far_above_or_below_every_logit(implementation: Implementation, need: Need) -> None:
    """It leaves nothing, or all; neither overflows."""
    for query_lens in ([1], [30]):
        q, keys, values, batch = attention_case(query_lens, [40], (4, 2, 16), need.dtype, 4, None, need.device)
        attend = made(implementation, need)
        plain = attend(q, keys, values, batch, 0.25, None)
        sinks = torch.tensor([-1000.0, 1000.0, -1000.0, 1000.0], device=need.device)
        out = attend(q, keys, values, batch, 0.25, None, 1.0, sinks).unflatten(1, (4, 16))
        check(out[:, ::2].flatten(1), plain.unflatten(1, (4, 16))[:, ::2].flatten(1), need.dtype)
        assert float(out[:, 1::2].abs().max()) < 1e-30  # the native exponential stops at 1e-38


@every("paged_attention")
def test_paged_attention_of_a_long_context(implementation: Implementation, need: Need) -> None:
    """Longer than any block that a kernel splits queries or keys into."""
    for window, sinks in ((None, None), (128, some_sinks(4, True, need))):
        for query_lens, seq_lens in (([1, 1], [1500, 700]), ([600], [1100]), ([1100], [1100])):
            lens = query_lens, seq_lens
            q, keys, values, batch = attention_case(*lens, (4, 2, 16), need.dtype, 16, window, need.device)
            given = q, keys, values, batch, 0.25, window, 1.0, sinks
            check(made(implementation, need)(*given), reference_attention.paged_attention(*given), need.dtype)


@every("block_linear")
@pytest.mark.parametrize("shape", [(64, 48), (576, 320), (96, 50)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_block_linear(implementation: Implementation, need: Need, shape: tuple[int, int], has_bias: bool) -> None:
    """Its truth is a dense matmul with the weight as the gguf package dequantizes it."""
    in_features, out_features = shape
    block_linear = made(implementation, need)
    assert block_linear.qtypes
    tried = 0
    for qtype in sorted(block_linear.qtypes):
        kind = gguf.GGMLQuantizationType[qtype]
        if in_features % gguf.GGML_QUANT_SIZES[kind][0]:
            continue
        tried += 1
        raw = blocks_of(kind, out_features, in_features)
        weight = torch.from_numpy(gguf.quants.dequantize(raw, kind)).float()
        packed = block_linear.pack(torch.from_numpy(raw), qtype, in_features)
        bias = random(out_features, need=need) if has_bias else None
        for rows in range(1, block_linear.max_rows + 1):
            x = random(rows, in_features, need=need)
            poison(rows, out_features, need=need)
            y = block_linear(x, packed, bias)
            check(y, pointwise.linear(x, weight, bias), need.dtype)
            one_by_one = torch.cat([block_linear(x[row : row + 1].clone(), packed, bias) for row in range(rows)])
            check(one_by_one, y, need.dtype)
    assert tried or in_features % 256


def blocks_of(kind: gguf.GGMLQuantizationType, out_features: int, in_features: int) -> np.ndarray[Any, Any]:
    """Random weights quantized by the gguf package."""
    weight = torch.randn(out_features, in_features).numpy()
    return gguf.quants.quantize(weight, kind)
