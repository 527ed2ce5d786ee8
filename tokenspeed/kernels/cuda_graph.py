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
    def capturing(self, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
        """`torch.cuda.graph` without what it does before each: waiting for the device and giving the allocator's free
        blocks back, which the next size's first run would ask for again."""
        before = torch.cuda.current_stream(stream.device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool)
            try:
                yield
            finally:
                self._graph.capture_end()
        before.wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphRecorder:
    """Satisfies `Recorder`. Whatever is recorded must have run once before: kernels compile and load outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def record(self) -> Iterator[CudaStepGraph]:
        if self._stream is None:  # one for all: the allocator keeps blocks of the pool by stream
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = CudaStepGraph()
        with graph.capturing(self._pool, self._stream):
            yield graph
