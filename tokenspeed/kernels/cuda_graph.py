"""CUDA graphs behind the `Recorder` face. Graphs of one recorder share a memory pool: at most one of them runs at a
time, on one stream, and what a graph returns is valid until another is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CudaStepGraph:
    """A captured graph. Satisfies `StepGraph`."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capturing(self, pool: Any) -> Iterator[None]:
        with torch.cuda.graph(self._graph, pool=pool):
            yield

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder:
    """Satisfies `Recorder`. Whatever is recorded must have run once before: kernels compile and load outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def record(self) -> Iterator[CudaStepGraph]:
        graph = CudaStepGraph()
        with graph.capturing(self._pool):
            yield graph
