"""Inputs of kernel tests are new in every run; the seed is printed beside a failure."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")
