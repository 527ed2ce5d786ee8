from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.sampling.filters import kth_device, kth_host, nucleus_device, nucleus_host

rows = st.lists(st.lists(st.integers(0, 1 << 44), min_size=6, max_size=6), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(values=rows, data=st.data())
def test_host_and_device_ways_agree(values: list[list[int]], data: st.DataObject) -> None:
    weights = torch.tensor(values)
    weights[:, 0].clamp_(min=1)
    need = torch.tensor([data.draw(st.integers(1, int(row.sum()))) for row in weights])
    least = nucleus_host(weights, need)
    assert torch.equal(least, nucleus_device(weights, need))
    for row, limit, wanted in zip(weights, least, need, strict=True):
        assert row[row >= limit].sum() >= wanted > row[row > limit].sum()
    ks = [data.draw(st.integers(1, 6)) for _ in values]
    kth = kth_host(weights.float(), ks)
    assert torch.equal(kth, kth_device(weights.float(), ks))
    assert kth.flatten().tolist() == [sorted(row.float().tolist())[-k] for row, k in zip(weights, ks, strict=True)]


def test_partial_sort_too_short_for_a_wide_nucleus() -> None:
    weights = torch.randint(1, 1 << 20, (3, 5000), generator=torch.Generator().manual_seed(0))
    weights[1, :10] = 1 << 40  # this row's nucleus is narrow
    need = (weights.sum(-1) * 9) // 10
    assert torch.equal(nucleus_host(weights, need), nucleus_device(weights, need))
