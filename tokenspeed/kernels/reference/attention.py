"""The truth for paged attention: one request at a time, pages gathered, softmax(q k^T scale) v in fp32.

There is no reference `block_linear`: the op is optional, and its truth is a dense matmul with the dequantized weight.
"""

from __future__ import annotations

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference.pointwise import reference


def gather_pages(pool: torch.Tensor, pages: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
    """Tokens [first, length) of a request. pool [num_pages, page_size, heads, D] -> a copy [length - first, heads, D].

    Pages before that of `first` are not looked at: a sliding window has given them to others.
    """
    page_size = pool.shape[1]
    first_page = first // page_size
    gathered = pool[pages[first_page : -(-length // page_size)].long()].flatten(0, 1)
    return gathered[first - first_page * page_size : length - first_page * page_size]


def first_seen(query_len: int, seq_len: int, window: int | None) -> int:
    """The first position that any of a request's last `query_len` tokens sees."""
    return 0 if window is None else max(0, seq_len - query_len - window + 1)


def visible(query_len: int, seq_len: int, window: int | None) -> torch.Tensor:
    """Boolean [query_len, seq_len]: which keys a query sees, the queries being the last `query_len` of them."""
    query = torch.arange(seq_len - query_len, seq_len)[:, None]
    key = torch.arange(seq_len)[None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    out_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
) -> torch.Tensor:
    """See `ops.PagedAttention`. Reads lengths from the device tensors, so the host twins are not needed."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    group = num_heads // keys.shape[2]
    starts, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    out = torch.zeros(q.shape[0], num_heads * head_dim, dtype=q.dtype, device=q.device)
    for request in range(batch.num_requests):
        start, end, seq_len = starts[request], starts[request + 1], seq_lens[request]
        if start == end:
            continue
        first = first_seen(end - start, seq_len, window)
        k = gather_pages(keys, batch.page_table[request], seq_len, first).float().repeat_interleave(group, dim=1)
        v = gather_pages(values, batch.page_table[request], seq_len, first).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        if logit_cap is not None:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        seen = visible(end - start, seq_len - first, window).to(q.device)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - start, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : seq_len - first]
        out[start:end] = (torch.einsum("hqk,khd->qhd", weights, v) * out_scale).flatten(1).to(q.dtype)
    return out


IMPLEMENTATIONS = (reference("paged_attention", paged_attention, can_record=False),)
