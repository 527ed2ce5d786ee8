from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.sampling.filters import kth_largest, nucleus

rows = st.lists(st.lists(st.integers(0, 1 << 44), min_size=6, max_size=6), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(values=rows, data=st.data())
def test_the_last_that_stays(values: list[list[int]], data: st.DataObject) -> None:
    weights = torch.tensor(values)
    weights[:, 0].clamp_(min=1)
    need = torch.tensor([data.draw(st.integers(1, int(row.sum()))) for row in weights])
    for row, limit, wanted in zip(weights, nucleus(weights, need), need, strict=True):
        assert row[row >= limit].sum() >= wanted > row[row > limit].sum()
    ks = [data.draw(st.integers(1, 6)) for _ in values]
    kth = kth_largest(weights.float(), ks)
    assert kth.flatten().tolist() == [sorted(row.float().tolist())[-k] for row, k in zip(weights, ks, strict=True)]
