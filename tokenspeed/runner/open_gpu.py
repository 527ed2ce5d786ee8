"""Opens the GPU and the library of matrix products on a thread of its own, while Triton and the kernels are imported
and kernels are listed: a CUDA context takes 0.35 s and the first product 0.3 to 0.9 s, most of both without Python."""

from __future__ import annotations

import contextlib
import threading

import torch

SIDE = 1024


def open_gpu(dtype: torch.dtype) -> threading.Thread:
    """A thread that is at it; to be joined before memory is measured. What goes wrong there will go wrong again where
    it can be said."""
    thread = threading.Thread(target=_multiply, args=(dtype,), name="open-gpu", daemon=True)
    thread.start()
    return thread


def _multiply(dtype: torch.dtype) -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # torch without CUDA: the latter
        ones = torch.ones(SIDE, SIDE, dtype=dtype, device="cuda")
        torch.mm(ones, ones)
        torch.cuda.synchronize()
