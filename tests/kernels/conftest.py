"""Inputs of kernel tests are new in every run; the seed is printed beside a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"seed {seed}")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every buffer that torch makes without values holds NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
