"""Every native operation against plain torch in float32, on fresh random inputs, by both builds."""

from __future__ import annotations

import pytest
import torch
from native_support import (
    BF16,
    BUILDS,
    HALF_FIELDS,
    HAS_COMPILER,
    attention_truth,
    context,
    dequantized,
    paged_batch,
    random_blocks,
    relative_error,
)
from torch.nn import functional

from tokenspeed.kernels.cpu.native.context import NativeBlockLinear, NativeContext
from tokenspeed.kernels.cpu.native.library import Op, encode

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
ROWS = (1, 2, 3, 7, 8, 9, 31, 32)
ONE_ROUNDING = 0.004
"""Relative error allowed where the only loss is one rounding to bfloat16 (2^-9 worst, about 0.0017 in the norm)."""


@pytest.fixture(params=BUILDS)
def native(request: pytest.FixtureRequest) -> NativeContext:
    return context(request.param)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN, so an element that is never written cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("rows", ROWS)
def test_embedding_copies_rows_and_guards_the_table(native: NativeContext, rows: int) -> None:
    table = torch.randn(37, 80).to(BF16)
    ids = torch.randint(0, 37, (rows,))
    assert torch.equal(native.embedding(ids, table), table[ids])
    ids[rows - 1] = 37
    assert native.embedding(ids, table)[rows - 1].isnan().all()


@pytest.mark.parametrize("width", (16, 80, 100, 576, 1025))
@pytest.mark.parametrize("rows", (1, 3, 32))
def test_norms(native: NativeContext, rows: int, width: int) -> None:
    x, residual, weight = (
        torch.randn(rows, width).to(BF16),
        torch.randn(rows, width).to(BF16),
        torch.randn(width).to(BF16),
    )
    truth = functional.rms_norm(x.float(), (width,), weight.float(), 1e-5)
    assert relative_error(native.rms_norm(x, weight, 1e-5), truth) < ONE_ROUNDING
    total = (x.float() + residual.float()).to(BF16)
    out = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert relative_error(out, functional.rms_norm(total.float(), (width,), weight.float(), 1e-5)) < ONE_ROUNDING


@pytest.mark.parametrize("inner", (16, 50, 512, 1536, 1537))
@pytest.mark.parametrize("rows", (1, 3, 32))
def test_silu_and_mul(native: NativeContext, rows: int, inner: int) -> None:
    gate_up = (torch.randn(rows, 2 * inner) * 8).to(BF16)
    gate_up[0, 0], gate_up[0, 1] = 300.0, -300.0
    gate, up = gate_up.float().chunk(2, dim=1)
    assert relative_error(native.silu_and_mul(gate_up), functional.silu(gate) * up) < ONE_ROUNDING


@pytest.mark.parametrize("head_dim", (64, 80, 128))
@pytest.mark.parametrize(("heads", "kv_heads"), ((9, 3), (4, 4), (8, 1)))
@pytest.mark.parametrize("normed", (False, True))
def test_qkv_rope_cache(native: NativeContext, heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    rows, page_size = 5, 16
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(BF16)
    positions = torch.randint(0, 50, (rows,))
    cos_sin = torch.randn(50, head_dim)
    keys = torch.full((3, page_size, kv_heads, head_dim), 7.0).to(BF16)
    values = torch.full_like(keys, 7.0)
    slots = torch.randperm(48)[:rows]
    slots[2] = -1  # a padding row
    q_norm, k_norm = (torch.randn(head_dim).to(BF16), torch.randn(head_dim).to(BF16)) if normed else (None, None)
    q, k, v = qkv.float().view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if normed:
        q = functional.rms_norm(q, (head_dim,), q_norm.float(), 1e-6)
        k = functional.rms_norm(k, (head_dim,), k_norm.float(), 1e-6)
    half = head_dim // 2
    cos, sin = cos_sin[positions, None, :half], cos_sin[positions, None, half:]

    def turn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)

    expected_q, expected_k, v = turn(q), turn(k), v.clone()
    out = native.qkv_rope_cache(qkv, positions, cos_sin, keys, values, slots, q_norm, k_norm, 1e-6)
    assert out.shape == (rows, heads, head_dim)
    assert relative_error(out, expected_q) < ONE_ROUNDING
    written = [t for t in range(rows) if t != 2]
    assert relative_error(keys.view(-1, kv_heads, head_dim)[slots[written]], expected_k[written]) < ONE_ROUNDING
    assert torch.equal(values.view(-1, kv_heads, head_dim)[slots[written]].float(), v[written])
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[written]] = False
    assert (keys.view(48, -1)[untouched] == 7).all() and (values.view(48, -1)[untouched] == 7).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), ((48, 64), (33, 96), (5, 20), (100, 576)))
def test_linear(native: NativeContext, rows: int, out_features: int, in_features: int) -> None:
    x, weight = torch.randn(rows, in_features).to(BF16), torch.randn(out_features, in_features).to(BF16)
    bias = torch.randn(out_features).to(BF16)
    out = torch.full((rows, out_features), float("nan"), dtype=BF16)
    pointers = tuple(t.data_ptr() for t in (x, weight, bias, out))
    native.library.run(encode(Op.LINEAR, (rows, in_features, out_features), pointers))
    assert relative_error(out, x.float() @ weight.float().t() + bias.float()) < ONE_ROUNDING
    alone = native.linear(x[:1], weight, bias)
    assert torch.equal(out[:1], alone), "a row's result depends on its neighbours"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("qtype", HALF_FIELDS)
def test_block_linear(native: NativeContext, rows: int, qtype: str) -> None:
    block_linear = NativeBlockLinear(native)
    in_features = 512 if qtype.endswith("K") else 96
    for out_features in (16, 35):
        raw = random_blocks(qtype, out_features, in_features)
        truth = dequantized(raw, qtype)
        packed = block_linear.pack(raw, qtype, in_features)
        x, bias = torch.randn(rows, in_features).to(BF16), torch.randn(out_features).to(BF16)
        exact = x.double() @ truth.double().t()
        # Scales of K types are rounded to half precision, the others are exact.
        limit = 1e-3 if qtype.endswith("K") else 2e-6
        assert relative_error(block_linear(x, packed, None, torch.float32), exact) < limit
        out = block_linear(x, packed, bias)
        assert relative_error(out, exact + bias.double()) < ONE_ROUNDING
        for row in range(rows):
            alone = block_linear(x[row : row + 1].clone(), packed, bias)
            assert torch.equal(out[row : row + 1], alone), "a row's result depends on its neighbours"


@pytest.mark.parametrize(("heads", "kv_heads"), ((9, 3), (4, 4), (8, 1), (7, 1), (12, 2)))
@pytest.mark.parametrize(("head_dim", "page_size"), ((64, 16), (64, 64), (80, 16), (128, 64), (48, 7)))
def test_paged_attention_decode(
    native: NativeContext, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    seq_lens = [1, 2, 16, 17, 63, 64, 65, 128, 300, 1000]
    keys, values, batch = paged_batch([1] * len(seq_lens), seq_lens, page_size, kv_heads, head_dim)
    q = torch.randn(len(seq_lens), heads, head_dim).to(BF16)
    for window in (None, 1, 50, 64, 999):
        out = native.paged_attention(q, keys, values, batch, head_dim**-0.5, window)
        truth = attention_truth(q, keys, values, batch, head_dim**-0.5, window)
        for row in range(len(seq_lens)):
            assert relative_error(out[row], truth[row]) < ONE_ROUNDING, f"row {row}, window {window}"


def test_paged_attention_of_several_rows_a_request(native: NativeContext) -> None:
    keys, values, batch = paged_batch([3, 1, 20, 5], [3, 200, 150, 5], 16, 2, 64)
    q = torch.randn(29, 6, 64).to(BF16)
    for window in (None, 33):
        out = native.paged_attention(q, keys, values, batch, 0.125, window)
        assert relative_error(out, attention_truth(q, keys, values, batch, 0.125, window)) < ONE_ROUNDING


@pytest.mark.parametrize("window", (None, 1, 128))
def test_paged_attention_with_sinks(native: NativeContext, window: int | None) -> None:
    """Contexts of one part and of several; GPT-OSS has 8 query heads a key head."""
    keys, values, batch = paged_batch([1, 1, 3, 1], [1, 40, 200, 1500], 16, 1, 64)
    q, sinks = torch.randn(6, 8, 64).to(BF16), torch.randn(8) * 4
    out = native.paged_attention(q, keys, values, batch, 0.125, window, 1.0, sinks)
    truth = attention_truth(q, keys, values, batch, 0.125, window, sinks)
    for row in range(6):
        assert relative_error(out[row], truth[row]) < ONE_ROUNDING, f"row {row}"


def test_sinks_of_a_row_without_context_or_with_nan(native: NativeContext) -> None:
    keys, values, batch = paged_batch([1, 1], [40, 70], 16, 2, 64)
    q = torch.randn(2, 4, 64).to(BF16)
    batch.seq_lens[1] = 0
    assert not native.paged_attention(q, keys, values, batch, 0.125, None, 1.0, torch.randn(4))[1].any()
    q[0] = torch.nan
    assert native.paged_attention(q, keys, values, batch, 0.125, None, 1.0, torch.randn(4))[0].isnan().all()


def test_paged_attention_takes_a_view_of_qkv(native: NativeContext) -> None:
    keys, values, batch = paged_batch([1, 1], [40, 70], 16, 2, 64)
    qkv = torch.randn(2, 8 * 64).to(BF16)
    q = qkv[:, : 4 * 64].unflatten(1, (4, 64))
    out = native.paged_attention(q, keys, values, batch, 0.125, None)
    assert torch.equal(out, native.paged_attention(q.contiguous(), keys, values, batch, 0.125, None))


def test_paged_attention_gives_zeros_without_context(native: NativeContext) -> None:
    """Padding rows of a tape: no context, or no request at all."""
    keys, values, batch = paged_batch([1, 1], [40, 70], 16, 2, 64)
    q = torch.randn(3, 4, 64).to(BF16)
    batch.seq_lens[1] = 0
    batch.num_tokens = 3
    out = native.paged_attention(q, keys, values, batch, 0.125, None)
    assert out[0].abs().sum() > 0
    assert (out[1:] == 0).all()


def test_paged_attention_keeps_a_poisoned_request_alone(native: NativeContext) -> None:
    keys, values, batch = paged_batch([1, 1, 1], [40, 70, 500], 16, 2, 64)
    q = torch.randn(3, 4, 64).to(BF16)
    clean = native.paged_attention(q, keys, values, batch, 0.125, None)
    q[1] = float("nan")
    out = native.paged_attention(q, keys, values, batch, 0.125, None)
    assert out[1].isnan().all()
    assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])


def test_extreme_scores_do_not_overflow(native: NativeContext) -> None:
    keys, values, batch = paged_batch([1], [200], 16, 1, 64)
    q = (torch.randn(1, 2, 64) * 1000).to(BF16)
    out = native.paged_attention(q, keys, values, batch, 1.0, None)
    assert relative_error(out, attention_truth(q, keys, values, batch, 1.0, None)) < ONE_ROUNDING


@pytest.mark.parametrize("build_name", BUILDS)
def test_results_do_not_depend_on_the_number_of_threads(build_name: str) -> None:
    raw = random_blocks("Q4_1", 576, 1536)
    x = torch.randn(7, 1536).to(BF16)
    keys, values, batch = paged_batch([1] * 4, [1, 100, 700, 2000], 64, 3, 64)
    q = torch.randn(4, 9, 64).to(BF16)
    results = []
    for num_threads in (1, 2, 3, 5):
        native = context(build_name, num_threads)
        block_linear = NativeBlockLinear(native)
        y = block_linear(x, block_linear.pack(raw, "Q4_1", 1536), None)
        results.append((y, native.paged_attention(q, keys, values, batch, 0.125, None)))
    for y, attended in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(attended, results[0][1])


def test_attention_of_a_request_does_not_depend_on_its_neighbours(native: NativeContext) -> None:
    keys, values, batch = paged_batch([1] * 3, [90, 1500, 7], 16, 2, 64)
    q = torch.randn(3, 6, 64).to(BF16)
    together = native.paged_attention(q, keys, values, batch, 0.125, None)
    for r in range(3):
        batch_alone = type(batch)(
            torch.tensor([0, 1], dtype=torch.int32),
            batch.seq_lens[r : r + 1].clone(),
            batch.page_table[r : r + 1].clone(),
            batch.slots[r : r + 1].clone(),
            1,
            1,
        )
        alone = native.paged_attention(q[r : r + 1].clone(), keys, values, batch_alone, 0.125, None)
        assert torch.equal(alone[0], together[r])
