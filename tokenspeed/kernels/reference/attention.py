"""The truth for paged attention: one request at a time, pages gathered, softmax(q k^T scale) v in fp32.

There is no reference `block_linear`: the op is optional, and its truth is a dense matmul with the dequantized weight.
"""

from __future__ import annotations

import torch

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference.pointwise import reference


def gather_pages(pool: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a request. pool [num_pages, page_size, heads, D] -> a copy [length, heads, D]."""
    num_pages = -(-length // pool.shape[1])
    return pool[pages[:num_pages].long()].flatten(0, 1)[:length]


def visible(query_len: int, seq_len: int, window: int | None) -> torch.Tensor:
    """Boolean [query_len, seq_len]: which keys a query sees, the queries being the last `query_len` tokens."""
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
        k = gather_pages(keys, batch.page_table[request], seq_len).float().repeat_interleave(group, dim=1)
        v = gather_pages(values, batch.page_table[request], seq_len).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        seen = visible(end - start, seq_len, window).to(q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:end] = (torch.einsum("hqk,khd->qhd", weights, v) * out_scale).flatten(1).to(q.dtype)
    return out


IMPLEMENTATIONS = (reference("paged_attention", paged_attention),)
