"""Decode attention that reads before it waits: right, and blind to what the launch before it has yet to write.

In the interpreter `gdc_wait` is a function of the test that writes the newest tokens: before it there is NaN in their
place. On a GPU the launch before is the real one, in a graph of several layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.kernels.triton import decode_attention as module
from tokenspeed.kernels.triton.decode_attention import (
    DecodeTile,
    choose_decode_tile,
    decode_attention,
    decode_workspace,
)
from tokenspeed.kernels.triton.pointwise import qkv_rope_cache

E4M3 = torch.float8_e4m3fn
BOUND = 1e-2 if torch.bfloat16 == KIND else 5e-6

TILES = [
    DecodeTile(1, 16, 4, 1, early=1),
    DecodeTile(1, 16, 4, 3, early=2, ahead=2),
    DecodeTile(3, 16, 4, 3, early=1, merge=2),
    DecodeTile(4, 16, 4, 3, early=2, ahead=1, merge=4),
    DecodeTile(3, 32, 4, 3, least_blocks=2, early=1, ahead=1),
    DecodeTile(4, 16, 4, 3, merge=4),
]
LENGTHS = [0, 1, 2, 15, 16, 17, 32, 33, 49, 97] + ([63, 64, 65, 128, 129, 700] if ON_GPU else [])
VIEWS: list[tuple[int | None, bool, float | None]] = [
    (None, False, None), (None, True, 5.0), (1, True, None), (7, False, None), (16, True, None), (33, True, 2.0),
]  # fmt: skip
"""Window, whether there are sinks, cap."""


class Pool:
    """Requests with shuffled pages; NaN in every slot that none of them owns, and page numbers past their lengths that
    point nowhere."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], page_size: int, kind: torch.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        counts = [-(-length // page_size) for length in lengths]
        pages = torch.randperm(sum(counts) + 1).to(torch.int32)
        table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
        rows = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            first = sum(counts[:row])
            table[row, :count] = pages[first : first + count]
            at = torch.arange(length)
            rows.append(table[row, at // page_size].long() * page_size + at % page_size)
        self.slots = rows  # of each request's tokens
        self.table, self.lens = table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        shape = (len(pages), page_size, *heads[1:])
        self.keys, self.values = (torch.full(shape, torch.nan).to(kind).to(DEVICE) for _ in range(2))
        for row in rows:
            for pool in (self.keys, self.values):
                flat(pool)[row.to(DEVICE)] = torch.randn(len(row), *heads[1:]).to(kind).to(DEVICE)
        self.newest = torch.stack([row[-1] for row in rows if len(row)]).to(DEVICE)

    def forget_newest(self) -> None:
        for pool in (self.keys, self.values):
            if pool.dtype == E4M3:
                flat(pool).view(torch.uint8)[self.newest] = 0x7F
            else:
                flat(pool)[self.newest] = torch.nan

    def truth(
        self, q: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None, cap: float | None
    ) -> torch.Tensor:
        """Float64 attention, one request at a time."""
        outs = []
        group = self.num_heads // self.num_kv_heads
        for row, slots in enumerate(self.slots):
            seen = slots[-window:] if window is not None else slots
            k, v = (
                flat(pool)[seen.to(DEVICE)].double().repeat_interleave(group, 1) for pool in (self.keys, self.values)
            )
            logits = torch.einsum("hd,nhd->hn", q[row].double(), k) * scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            if sinks is not None:
                logits = torch.cat((logits, sinks.double()[:, None]), 1)
            outs.append(torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : len(seen)], v).flatten())
        return torch.stack(outs)


def flat(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(-1, *pool.shape[2:])


def settle() -> None:
    """No launch is under way: torch's last one may have written what an early tile reads."""
    if ON_GPU:
        torch.cuda.synchronize()


def check(out: torch.Tensor, truth: torch.Tensor) -> None:
    assert out.shape == truth.shape
    error = (out.double() - truth).norm(dim=1)
    assert (error <= BOUND * truth.norm(dim=1)).all(), error / truth.norm(dim=1)


SMALL, ODD = (4, 2, 16), (3, 1, 80)
POOLS: list[Any] = [
    pytest.param(8, SMALL, VIEWS[1:3], id="blocks of two pages"),
    pytest.param(16, SMALL, VIEWS[3:], id="blocks of a page"),
    pytest.param(16, ODD, VIEWS[1:2], id="odd heads"),
    pytest.param(32, SMALL, VIEWS[:1], id="half pages"),
]
SERVED = [(64, 8, 64), (32, 8, 128), (32, 4, 128)]
if ON_GPU:  # each is compiled anew; 64 is the page size that GPUs use
    ON_PAGES = {8: [SMALL, ODD], 16: [SMALL, SERVED[0]], 32: [ODD, SERVED[1]], 64: [SMALL, ODD, *SERVED]}
    POOLS = [
        pytest.param(size, heads, VIEWS, id=f"{heads} by {size}")
        for size, chosen in ON_PAGES.items()
        for heads in chosen
    ]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("page_size", "heads", "views"), POOLS)
def test_every_length_and_view(
    tile: DecodeTile, page_size: int, heads: tuple[int, int, int], views: list[tuple[int | None, bool, float | None]]
) -> None:
    pool = Pool(LENGTHS, heads, page_size, KIND)
    q = torch.randn(len(LENGTHS), heads[0], heads[2]).to(KIND).to(DEVICE)
    workspace = decode_workspace(len(LENGTHS), *heads, tile.num_splits, DEVICE)
    for window, has_sinks, cap in views:
        sinks = torch.randn(heads[0], device=DEVICE) if has_sinks else None
        settle()
        out = decode_attention(
            q, pool.keys, pool.values, pool.table, pool.lens, 0.2, workspace, tile, window, sinks, cap, pdl=ON_GPU
        )
        check(out, pool.truth(q, 0.2, window, sinks, cap))
        assert not workspace[2].any(), "counters must be zero again"


@pytest.mark.parametrize("tile", TILES[:4], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_an_8_bit_pool(tile: DecodeTile, window: int | None) -> None:
    heads = (4, 2, 32)
    pool = Pool(LENGTHS, heads, 16, E4M3)
    q = torch.randn(len(LENGTHS), heads[0], heads[2]).to(KIND).to(DEVICE)
    workspace = decode_workspace(len(LENGTHS), *heads, tile.num_splits, DEVICE)
    args = (q, pool.keys, pool.values, pool.table, pool.lens, 0.1, workspace, tile, window)
    settle()
    out = decode_attention(*args, pdl=ON_GPU, out_scale=0.5)
    check(out, pool.truth(q, 0.1, window, None, None) * 0.5)


@pytest.mark.skipif(ON_GPU, reason="the interpreter runs gdc_wait as a function")
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_what_the_launch_before_writes_is_read_after_the_wait(
    tile: DecodeTile, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and newest tokens come with the wait. A wrong newest token from before it would be NaN for good."""
    heads = (4, 2, 16)
    pool = Pool(LENGTHS, heads, 16, KIND)
    q = torch.randn(len(LENGTHS), heads[0], heads[2])
    truth = pool.truth(q, 0.2, window, None, None)
    written = [flat(pool.keys)[pool.newest].clone(), flat(pool.values)[pool.newest].clone(), q.clone()]
    waits = 0

    def forget() -> None:
        pool.forget_newest()
        q.fill_(torch.nan)

    def wait() -> None:
        nonlocal waits
        waits += 1
        flat(pool.keys)[pool.newest], flat(pool.values)[pool.newest] = written[:2]
        q.copy_(written[2])

    monkeypatch.setattr(module, "gdc_wait", wait)
    monkeypatch.setattr(module, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(module, "prefetch_l2", lambda addresses: None)
    workspace = decode_workspace(1, *heads, tile.num_splits, DEVICE)
    for row in range(len(LENGTHS)):
        forget()
        one = slice(row, row + 1)
        out = decode_attention(
            q[one], pool.keys, pool.values, pool.table[one], pool.lens[one], 0.2, workspace, tile, window, pdl=True
        )
        check(out, truth[one])
    assert waits >= heads[1] * len(LENGTHS)


# ---- on a GPU, behind the real launch -------------------------------------------------------------------------------

SHAPES: list[Any] = [
    pytest.param((32, 8, 128), None, False, KIND, 64, id="Qwen3-8B"),
    pytest.param((32, 4, 128), None, False, KIND, 64, id="Qwen3-30B-A3B"),
    pytest.param((64, 8, 64), None, True, KIND, 64, id="GPT-OSS"),
    pytest.param((64, 8, 64), 128, True, KIND, 64, id="GPT-OSS, window"),
    pytest.param((32, 8, 128), None, False, E4M3, 64, id="Qwen3-8B, 8 bits"),
    pytest.param((64, 8, 64), 128, True, E4M3, 16, id="GPT-OSS, window, 8 bits, small pages"),
    pytest.param((64, 8, 64), None, True, KIND, 16, id="GPT-OSS, small pages"),
]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64, 130])
@pytest.mark.parametrize(("heads", "window", "has_sinks", "kind", "page_size"), SHAPES)
def test_behind_the_launch_that_writes(
    heads: tuple[int, int, int],
    window: int | None,
    has_sinks: bool,
    kind: torch.dtype,
    page_size: int,
    num_requests: int,
) -> None:
    """A graph of layers, each the rotary launch and attention over a pool of its own with NaN for newest tokens."""
    num_heads, num_kv_heads, head_dim = heads
    lengths = [1 + (index * 67 + 599) % 700 for index in range(num_requests)]
    lengths[1:9] = [1, 2, 63, 64, 65, 128, 129, 1500][: num_requests - 1]
    layers = [Pool(lengths, heads, page_size, kind) for _ in range(4)]
    scale, total = head_dim**-0.5, num_heads + 2 * num_kv_heads
    sinks = torch.randn(num_heads, device=DEVICE) if has_sinks else None
    positions = torch.tensor(lengths, device=DEVICE) - 1
    angles = torch.randn(1500, head_dim // 2, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    given = torch.randn(num_requests, total * head_dim, device=DEVICE).to(KIND)
    qkv = [given.clone() for _ in layers]
    tile = choose_decode_tile(num_requests * num_kv_heads, head_dim, window)
    workspace = decode_workspace(num_requests, *heads, tile.num_splits, DEVICE)

    def step() -> list[tuple[torch.Tensor, torch.Tensor]]:
        outs = []
        for pool, one in zip(layers, qkv, strict=True):
            q = qkv_rope_cache(one, positions, cos_sin, pool.keys, pool.values, pool.newest, None, None, 1e-6)
            args = (q, pool.keys, pool.values, pool.table, pool.lens, scale, workspace, tile, window, sinks)
            outs.append((q, decode_attention(*args)))
        return outs

    def forget() -> None:
        for pool, one in zip(layers, qkv, strict=True):
            pool.forget_newest()
            one.copy_(given)

    forget()
    for pool, (q, out) in zip(layers, step(), strict=True):  # eagerly
        check(out, pool.truth(q, scale, window, sinks, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(5):
        forget()
        settle()
        graph.replay()
        for pool, (q, out) in zip(layers, outs, strict=True):
            check(out, pool.truth(q, scale, window, sinks, None))
    assert not workspace[2].any()
