"""Triton's attention, few-row linear and pointwise kernels against the reference in float64 or float32.

On a GPU at the shapes that engines use; elsewhere the same code in Triton's interpreter at small ones.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU, randn
from torch.nn import functional

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.ops import Ops
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.kernels.triton import whole_prompts
from tokenspeed.kernels.triton.decode_attention import (
    DecodeTile,
    choose_decode_tile,
    decode_attention,
    decode_workspace,
)
from tokenspeed.kernels.triton.launch import power_of_2
from tokenspeed.kernels.triton.pointwise import qkv_rope_cache, rms_norm, silu_and_mul
from tokenspeed.kernels.triton.prefill_attention import TILE, PrefillTile, prefill_attention
from tokenspeed.kernels.triton.registered import PagedAttention
from tokenspeed.kernels.triton.small_linear import (
    MAX_ROWS,
    GemvTile,
    SkinnyTile,
    choose_tile,
    fused_linear,
    make_workspace,
)

BOUND = 1e-2 if torch.bfloat16 == KIND else 2e-6
"""‖out - ref‖ / ‖ref‖, with inputs in KIND and the reference in float64."""


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


# ---- few-row linear -------------------------------------------------------------------------------------------------

LINEAR_SHAPES = [(96, 40), (512, 200), (640, 130)] + ([(4096, 6144), (4096, 4096), (12288, 4096)] if ON_GPU else [])
LINEAR_ROWS = (1, 2, 17, 64) if ON_GPU else (1, 2, 17)


def linear_truth(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * norm.double()
    y = x @ weight.t() + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=1)
        y = functional.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("normed", [False, True], ids=["raw", "normed"])
@pytest.mark.parametrize("added", [False, True], ids=["new", "added"])
@pytest.mark.parametrize(("width", "num_out"), LINEAR_SHAPES)
def test_fused_linear(width: int, num_out: int, added: bool, normed: bool, gated: bool) -> None:
    workspace = make_workspace(DEVICE)
    weight = randn(num_out, width) * width**-0.5
    bias, norm = randn(num_out), (torch.rand(width, device=DEVICE) + 0.5).to(KIND) if normed else None
    for num_rows in LINEAR_ROWS:
        if num_rows > 1 and width % 64:
            continue  # `why_not` of the op refuses such widths
        x = randn(num_rows, width)
        residual = randn(num_rows, num_out // 2 if gated else num_out) if added else None
        truth = linear_truth(x, weight, bias, norm, gated, residual)
        workspace.partials.fill_(torch.nan)
        y = fused_linear(x, weight, workspace, bias, norm, 1e-6, residual, gated, pdl=ON_GPU)
        assert residual is None or y is residual
        assert error(y, truth) < BOUND
        assert not workspace.counters.any(), "counters must be zero again"


@pytest.mark.parametrize(
    "tile",
    [GemvTile(2, 128, 4), SkinnyTile(32, 64, 1, 2), SkinnyTile(64, 64, 3, 2), SkinnyTile(64, 128, 4, 2)],
    ids=str,
)
def test_every_kind_of_tile(tile: GemvTile | SkinnyTile) -> None:
    num_rows = 1 if isinstance(tile, GemvTile) else 5
    x, weight, bias = randn(num_rows, 512), randn(150, 512) * 0.05, randn(150)
    y = fused_linear(x, weight, make_workspace(DEVICE), bias, tile=tile, pdl=ON_GPU)
    assert error(y, linear_truth(x, weight, bias, None, False, None)) < BOUND


@pytest.mark.parametrize("width", [576, 2048, 2880, 4096, 12288])
@pytest.mark.parametrize("num_rows", [2, 17, 33, MAX_ROWS])
def test_chosen_splits_fit_the_workspace(num_rows: int, width: int) -> None:
    """Regression: of all these numbers of outputs, 5441 to 5461 got three programs a tile, two tiles too many."""
    workspace = make_workspace(torch.device("cpu"))
    for num_out in (*range(16, 20_000), 24576, 152064):
        tile = choose_tile(num_rows, num_out, width, needs_whole_k=False)
        assert isinstance(tile, SkinnyTile)
        assert width % (tile.block_k * tile.split_k) == 0 or width // tile.block_k >= tile.split_k
        if tile.split_k == 1:
            continue
        tiles = -(-num_out // tile.block_n)
        assert tiles <= workspace.counters.numel()
        room = workspace.partials.numel() // (tile.block_n * max(16, power_of_2(num_rows)))
        assert tiles * tile.split_k <= room, f"{num_out} outputs: {tile}"


# ---- attention ------------------------------------------------------------------------------------------------------


class Case:
    """Requests with shuffled pages. `truth` is float64 attention, one request at a time."""

    def __init__(self, query_lens: list[int], contexts: list[int], heads: tuple[int, int, int], page_size: int) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.query_lens, self.seq_lens = query_lens, [q + c for q, c in zip(query_lens, contexts, strict=True)]
        width = -(-max(self.seq_lens) // page_size)
        count = len(query_lens)
        self.keys = randn(count * width + 1, page_size, num_kv_heads, head_dim)
        self.values = randn(count * width + 1, page_size, num_kv_heads, head_dim)
        order = torch.randperm(count * width, dtype=torch.int32)
        self.page_table = order.view(count, width).to(DEVICE)
        self.q = randn(sum(query_lens), num_heads, head_dim)
        self.scale = head_dim**-0.5

    def batch(self) -> AttentionBatch:
        starts = [0, *accumulate(self.query_lens)]
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device=DEVICE),
            page_table=self.page_table,
            slots=torch.zeros(starts[-1], dtype=torch.int64, device=DEVICE),
            num_requests=len(self.query_lens),
            num_tokens=starts[-1],
            query_lens_host=self.query_lens,
            seq_lens_host=self.seq_lens,
        )

    def truth(
        self, window: int | None = None, sinks: torch.Tensor | None = None, logit_cap: float | None = None
    ) -> torch.Tensor:
        outs, start = [], 0
        group = self.q.shape[1] // self.keys.shape[2]
        for request, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            pages = self.page_table[request].long()
            k = self.keys[pages].flatten(0, 1)[:seq_len].double().repeat_interleave(group, 1)
            v = self.values[pages].flatten(0, 1)[:seq_len].double().repeat_interleave(group, 1)
            q = self.q[start : start + query_len].double()
            start += query_len
            logits = torch.einsum("ihd,nhd->hin", q, k) * self.scale
            if logit_cap is not None:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            position = torch.arange(seq_len - query_len, seq_len, device=DEVICE)[:, None]
            other = torch.arange(seq_len, device=DEVICE)[None]
            hidden = other > position
            if window is not None:
                hidden = hidden | (other <= position - window)
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, query_len, 1)], dim=2)
            weights = logits.softmax(-1)[..., :seq_len]
            outs.append(torch.einsum("hin,nhd->ihd", weights, v).flatten(1))
        return torch.cat(outs)


HEADS = [(4, 2, 64), (3, 1, 80)] + ([(8, 8, 32), (32, 8, 128), (64, 8, 64)] if ON_GPU else [])
ATTENTION_EXTRAS = [(None, False, None), (20, True, None), (None, True, 5.0)]


@pytest.mark.parametrize(("window", "has_sinks", "logit_cap"), ATTENTION_EXTRAS)
@pytest.mark.parametrize("num_splits", [1, 3, 16] if ON_GPU else [1, 3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_attention(
    heads: tuple[int, int, int], num_splits: int, window: int | None, has_sinks: bool, logit_cap: float | None
) -> None:
    longest = 900 if ON_GPU else 150
    contexts = [0, 7, 63, 64, longest] if ON_GPU else [0, 63, longest]
    case = Case([1] * len(contexts), contexts, heads, page_size=16)
    sinks = randn(heads[0]) if has_sinks else None
    workspace = decode_workspace(len(contexts), *heads, num_splits, DEVICE)
    for _ in range(2):  # the counters must come back to zero
        out = decode_attention(
            case.q,
            case.keys,
            case.values,
            case.page_table,
            case.batch().seq_lens,
            case.scale,
            workspace,
            DecodeTile(num_splits, 64, 4, 3),
            window,
            sinks,
            logit_cap,
            pdl=ON_GPU,
        )
        assert error(out, case.truth(window, sinks, logit_cap)) < BOUND


@pytest.mark.parametrize(("window", "has_sinks", "logit_cap"), ATTENTION_EXTRAS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_attention(
    heads: tuple[int, int, int], window: int | None, has_sinks: bool, logit_cap: float | None
) -> None:
    query_lens, contexts = ([1, 200, 33, 700], [90, 0, 500, 11]) if ON_GPU else ([1, 40, 33], [90, 0, 50])
    case = Case(query_lens, contexts, heads, page_size=16)
    batch = case.batch()
    sinks = randn(heads[0]) if has_sinks else None
    out = prefill_attention(
        case.q,
        case.keys,
        case.values,
        batch.page_table,
        batch.query_start,
        batch.seq_lens,
        max(query_lens),
        case.scale,
        window,
        sinks,
        logit_cap,
        TILE if ON_GPU else PrefillTile(32, 32, 8, 3),
    )
    assert error(out, case.truth(window, sinks, logit_cap)) < BOUND


@pytest.mark.parametrize(
    ("query_lens", "contexts"),
    [([1, 1, 1], [5, 70, 33]), ([1, 40, 3], [9, 0, 50]), ([600, 600, 513], [0, 0, 0])],
    ids=["decode", "mixed", "whole prompts"],
)
def test_paged_attention_takes_every_batch(query_lens: list[int], contexts: list[int]) -> None:
    if not ON_GPU and max(query_lens) > 512:
        query_lens = [length // 3 for length in query_lens]  # the interpreter is slow; torch's part is covered below
    case = Case(query_lens, contexts, (4, 2, 64), page_size=16)
    out = PagedAttention(DEVICE, ON_GPU)(case.q, case.keys, case.values, case.batch(), case.scale, None)
    assert error(out, case.truth()) < BOUND


def test_whole_prompts_of_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_prompts, "DTYPES", (KIND,))
    case = Case([520, 520, 515, 530], [0, 0, 0, 0], (2, 1, 32), page_size=16)
    out = PagedAttention(DEVICE, ON_GPU)(case.q, case.keys, case.values, case.batch(), case.scale, None)
    assert error(out, case.truth()) < BOUND


def test_fewer_rows_have_more_splits() -> None:
    splits = [choose_decode_tile(rows, 128, None).num_splits for rows in (1, 8, 32, 128, 512, 2048)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] == 32
    assert splits[-1] == 1


@pytest.mark.parametrize("least_blocks", [1, 2, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_short_context_leaves_splits_without_work(least_blocks: int, has_sinks: bool) -> None:
    """Splits without blocks return at once; the last of the others merges, and the counters are zero again."""
    contexts = [1, 15, 16, 33, 100, 0]
    case = Case([1] * len(contexts), [max(0, length - 1) for length in contexts], (4, 2, 32), page_size=16)
    sinks = torch.randn(4, device=DEVICE) if has_sinks else None
    workspace = decode_workspace(len(contexts), 4, 2, 32, 6, DEVICE)
    tile = DecodeTile(6, 16, 4, 3, least_blocks)
    whole = decode_workspace(len(contexts), 4, 2, 32, 1, DEVICE)
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    table = case.batch().page_table
    args = (case.q, case.keys, case.values, table, seq_lens, case.scale)
    for _ in range(2):
        out = decode_attention(*args, workspace, tile, sinks=sinks, pdl=ON_GPU)
        alone = decode_attention(*args, whole, DecodeTile(1, 16, 4, 3), sinks=sinks, pdl=ON_GPU)
        assert error(out[:5], alone[:5]) < BOUND
        assert not out[5].any(), "a row without context is 0"
        assert not workspace[2].any()


def test_a_window_and_not_the_context_decides_how_decode_is_shared_out() -> None:
    for rows in (8, 512):
        for head_dim in (64, 80, 128, 256):
            short = choose_decode_tile(rows, head_dim, 128)
            assert short.num_splits == 1 and short.block_t * head_dim <= 128 * 64
        assert choose_decode_tile(rows, 64, 5).block_t == 16  # what a matrix instruction takes at least
        long = choose_decode_tile(rows, 64, 4096)
        assert long == choose_decode_tile(rows, 64, None)
    assert choose_decode_tile(8, 128, 300).num_splits == 5
    assert choose_decode_tile(128, 64, 128).early and not choose_decode_tile(512, 64, 128).early
    assert not choose_decode_tile(8, 64, 5000).ahead and choose_decode_tile(512, 128, None).early
    assert not choose_decode_tile(512, 256, None).early, "its blocks do not fit into the registers"


# ---- pointwise ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Ops:
    return select_ops(Need(DEVICE, KIND), only="reference")[0]


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (5, 700)] + ([(64, 4096), (1000, 4096)] if ON_GPU else []))
def test_norms(reference: Ops, rows: int, width: int) -> None:
    x, residual = randn(rows, width), randn(rows, width)
    weight = (torch.rand(width, device=DEVICE) + 0.5).to(KIND)
    assert error(rms_norm(x, weight, 1e-5, pdl=ON_GPU), reference.rms_norm(x, weight, 1e-5)) < BOUND
    ours, theirs = residual.clone(), residual.clone()
    y = rms_norm(x, weight, 1e-5, ours, pdl=ON_GPU)
    assert error(y, reference.add_rms_norm(x, theirs, weight, 1e-5)) < BOUND
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(1, (4, 2, 64)), (5, (3, 1, 80)), (70, (4, 2, 32))])
def test_rope_and_cache(reference: Ops, tokens: int, heads: tuple[int, int, int], has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)
    cos_sin = torch.randn(50, head_dim, device=DEVICE)
    slots = torch.randperm(160, device=DEVICE)[:tokens]
    norms = [(torch.rand(head_dim, device=DEVICE) + 0.5).to(KIND) if has_norm else None for _ in range(2)]
    results = []
    for run in (qkv_rope_cache, reference.qkv_rope_cache):
        keys, values = (torch.zeros(10, 16, num_kv_heads, head_dim, device=DEVICE).to(KIND) for _ in range(2))
        extra = {"pdl": ON_GPU} if run is qkv_rope_cache else {}
        q = run(qkv.clone(), positions, cos_sin, keys, values, slots, norms[0], norms[1], 1e-5, **extra)
        results.append((q, keys, values))
    for ours, theirs in zip(*results, strict=True):
        assert error(ours, theirs) < BOUND


@pytest.mark.parametrize(("rows", "width"), [(1, 100), (3, 1500)] + ([(257, 12288)] if ON_GPU else []))
def test_silu_and_mul(reference: Ops, rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width)
    assert error(silu_and_mul(gate_up, pdl=ON_GPU), reference.silu_and_mul(gate_up)) < BOUND
