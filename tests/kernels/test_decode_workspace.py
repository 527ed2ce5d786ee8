"""The scratch of decode attention: one for steps of every size, large enough for each, known after the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import attention_case
from kernel_device import DEVICE, KIND, ON_GPU

from tokenspeed.attention.interface import AttentionBatch
from tokenspeed.kernels.reference import attention as reference
from tokenspeed.kernels.triton import registered
from tokenspeed.kernels.triton.decode_attention import DecodeTile, decode_workspace
from tokenspeed.kernels.triton.registered import PagedAttention

META = torch.device("meta")
MIB = 2**20
BOUND = 1e-2 if torch.bfloat16 == KIND else 2e-6


def nbytes(workspace: tuple[torch.Tensor, ...]) -> int:
    return sum(part.numel() * part.element_size() for part in workspace)


@pytest.mark.parametrize(
    ("heads", "most_bytes"), [((32, 8, 128), 9 * MIB), ((64, 8, 64), 5 * MIB), ((16, 8, 256), 17 * MIB)]
)
def test_steps_of_all_sizes_have_one(
    heads: tuple[int, int, int], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every batch size had its own and kept it, 24 GiB for the sizes from 513 to 1024, and partials at one
    split as well. Steps that the trial did not try then ended the engine."""
    num_heads, num_kv_heads, head_dim = heads
    kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def note(q: torch.Tensor, *others: Any, **_: Any) -> torch.Tensor:
        workspace, tile = others[5], others[6]
        assert isinstance(tile, DecodeTile)
        needed = decode_workspace(len(q), num_heads, num_kv_heads, head_dim, tile.num_splits, META)
        assert all(has.numel() >= needs.numel() for has, needs in zip(workspace, needed, strict=True))
        kept.update((id(part), part) for part in workspace)
        return q

    monkeypatch.setattr(registered, "decode_attention", note)
    attend = PagedAttention(META, pdl=False)
    keys = torch.empty(1, 16, num_kv_heads, head_dim, device=META)
    first = 0
    for count in [600, *range(1, 1025)]:
        q = torch.empty(count, num_heads, head_dim, device=META)
        batch = AttentionBatch(q, q, q, q, num_requests=count, num_tokens=count)
        for window in (None, 128, 300, 4096):
            attend(q, keys, keys, batch, 1.0, window)
        first = first or nbytes(tuple(kept.values()))
    assert nbytes(tuple(kept.values())) == first, "whatever step comes first shows all there will be"
    assert 0 < first <= most_bytes


def test_one_split_needs_none() -> None:
    assert nbytes(decode_workspace(512, 32, 8, 128, 1, META)) == 0
    assert nbytes(decode_workspace(512, 32, 8, 128, 2, META)) > 0


def test_steps_of_different_sizes_do_not_disturb_each_other() -> None:
    """One after the other, on the same scratch: 32 splits, 16, as few as a window wants, 32 again."""
    heads = (4, 2, 32)
    attend = PagedAttention(DEVICE, ON_GPU)
    for count, window in ((3, None), (9, None), (9, 40), (1, None), (40, 20), (3, None)):
        lengths = [1 + 37 * row % (200 if count < 10 else 30) for row in range(count)]
        q, keys, values, batch = attention_case([1] * count, lengths, heads, KIND, 16, window, DEVICE)
        out = attend(q, keys, values, batch, 0.2, window)
        where = [t.double() for t in (q, keys, values)]
        truth = reference.paged_attention(*where, batch, 0.2, window)
        assert float((out.double() - truth).norm() / truth.norm()) < BOUND
