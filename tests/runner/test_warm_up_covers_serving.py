"""Nothing is compiled while serving: every kernel variant of random steps was met by the warm-up, and the compile
workers' part of it covers what the start needs. On a GPU that is not there, with published shapes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("covers_serving.py")


@pytest.mark.parametrize("model", ["qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_serving_meets_no_new_kernel(model: str) -> None:
    """In a process of its own: the interpreter of the other tests is switched on for good.

    The first steps of 17 and of 33 and more prompts used to compile four kernels of Qwen3-8B while serving."""
    seed = random.randrange(2**32)
    command = [sys.executable, str(SCRIPT), model, str(seed)]
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, env=compiled, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stdout}\n{ran.stderr[-3000:]}"
    assert ran.stdout.split()[-1] == "covered"
