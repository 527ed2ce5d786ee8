"""Fixtures that every room may use."""

from __future__ import annotations

import os

# The suite runs on two cores beside other work; tests that need threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton reads this when a kernel is declared, so it has to be set before any test module is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.resolve import resolve_checkpoint


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The embedded model, SmolLM2-135M-Instruct as GGUF; downloaded once and cached."""
    return resolve_checkpoint("default")
