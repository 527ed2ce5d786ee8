"""Random steps over a paged pool in which everything that no query may see is NaN or points nowhere."""

from __future__ import annotations

from itertools import accumulate

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference.attention import first_seen


def attention_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    page_size: int,
    window: int | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random paged keys and values: shuffled pages; NaN in every slot that no request owns or sees, and page ids past
    the length that point nowhere. Before the window of a step's first token the page ids are those of another
    request's pages, or of NaN."""
    num_heads, num_kv_heads, head_dim = heads
    pages_of = [-(-seq_len // page_size) for seq_len in seq_lens]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages).tolist()
    pools = [torch.full((num_pages, page_size, num_kv_heads, head_dim), torch.nan).to(dtype) for _ in range(2)]
    table = torch.full((len(seq_lens), max(pages_of) + 2), 2**30, dtype=torch.int32)
    slots: list[int] = []
    for r, seq_len in enumerate(seq_lens):
        mine = [order.pop() for _ in range(pages_of[r])]
        table[r, : len(mine)] = torch.tensor(mine)
        first = first_seen(query_lens[r], seq_len, window)
        table[r, : first // page_size] = int(torch.randint(num_pages, ()))
        written = [mine[p // page_size] * page_size + p % page_size for p in range(first, seq_len)]
        for pool in pools:
            pool.view(-1, num_kv_heads, head_dim)[written] = torch.randn(len(written), num_kv_heads, head_dim).to(dtype)
        slots += written[len(written) - query_lens[r] :]
    batch = AttentionBatch(
        query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        page_table=table.to(device),
        slots=torch.tensor(slots, device=device),
        num_requests=len(seq_lens),
        num_tokens=sum(query_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    q = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    return q.to(device), pools[0].to(device), pools[1].to(device), batch
