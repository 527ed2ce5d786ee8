"""Where the tests of Triton kernels run: a GPU, or the CPU through Triton's interpreter (set in tests/conftest.py)."""

from __future__ import annotations

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KIND = torch.bfloat16 if ON_GPU else torch.float32
"""Of activations: the interpreter multiplies matrices of bfloat16 by their bits."""


def randn(*shape: int) -> torch.Tensor:
    """Normal numbers where the tests run, in `KIND`."""
    return torch.randn(*shape, device=DEVICE).to(KIND)
