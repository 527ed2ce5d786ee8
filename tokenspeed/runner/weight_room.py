"""Whether a model's weights fit a GPU, asked before a byte of them is read: reading them would take minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenspeed.config.engine import EngineConfig
from tokenspeed.loader.kept_bytes import Kept, kept_bytes
from tokenspeed.loader.weights import CheckpointWeight
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.runner.memory_errors import GIB, MAX_SENSIBLE_UTILIZATION, gib, quantizing

CONTEXT_BYTES = 2 * GIB
"""More than what CUDA itself takes: then other processes use the GPU."""


class WeightRoom:
    """What is free on the GPU, measured when this is made: right before the weights are read, when the CUDA context and
    the libraries' kernels have taken theirs and no other thread of the engine takes any or gives some back.

    Fields:
        kept: bytes that the weights will take at least; 0 until `check`.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.gpu_memory_utilization is not None, "a GPU's share is resolved with the device"
        self.kept = 0
        self._config = config
        self._utilization = config.gpu_memory_utilization
        self._free, self._total = torch.cuda.mem_get_info()

    def check(self, weights: Sequence[CheckpointWeight], kept: Kept) -> None:
        """
        Args:
            weights: what will be read. kept: what becomes of it.
        Raises:
            ConfigError: they do not fit. Names the bytes needed, the bytes there, and the flags that would make it fit.
        """
        self.kept = kept_bytes(weights, kept)
        others = self._total - self._free
        share = int(self._total * self._utilization)
        room = min(self._free, share - others)
        if self.kept <= room:
            return
        there = f"{gib(self._free)} of {gib(self._total)} are free"
        if room < self._free:
            there += f", of which --gpu-memory-utilization {self._utilization:g} leaves {gib(max(0, room))}"
        found = []
        lighter = self._lighter(weights, kept)
        if lighter <= room:
            found += [f"{flag}: {gib(lighter)}" for flag in quantizing(self._config)]
        wanted = math.ceil((others + self.kept) / self._total * 100) / 100
        if self._utilization < wanted <= MAX_SENSIBLE_UTILIZATION and self.kept <= self._free:
            found.append(f"raise --gpu-memory-utilization above {wanted:g} (steps and the KV cache need more)")
        if others > CONTEXT_BYTES:
            found.append(f"end other processes that use the GPU ({gib(others)})")
        found.append("take a smaller or quantized checkpoint")
        raise ConfigError(f"the weights need at least {gib(self.kept)}, but {there}; {', or '.join(found)}")

    def _lighter(self, weights: Sequence[CheckpointWeight], kept: Kept) -> int:
        """Bytes with the flag that `quantizing` names."""
        if kept.dtype == torch.float32:
            # Linears in e4m3 stay so in bfloat16 alone.
            return kept_bytes(weights, replace(kept, dtype=torch.bfloat16, linears_in_e4m3=self._config.has_e4m3))
        return kept_bytes(weights, Kept(kept.dtype, quantizes=True))
