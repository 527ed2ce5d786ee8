"""Memory that nobody set, while kernels are listed and none runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tokenspeed.runner.compile_list import _Zeroed

COUNT = 300_000


def dirty() -> None:
    """Leave memory full of what is no index."""
    torch.full((COUNT,), 7.5e30)


@pytest.mark.parametrize(
    "make",
    [
        lambda like: torch.empty(COUNT),
        lambda like: torch.empty_like(like),
        lambda like: torch.empty_strided((COUNT,), (1,)),
        lambda like: like.new_empty(COUNT),
        lambda like: like.new_empty_strided((COUNT,), (1,)),
    ],
)
def test_unset_memory_is_zero(make) -> None:
    like = torch.ones(COUNT)
    found = []
    for _ in range(5):
        dirty()
        with torch.inference_mode(), _Zeroed():
            found.append(make(like).any().item())
    assert found == [False] * 5
    assert like.all()
