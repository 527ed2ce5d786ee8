"""How many rows of logits to process at a time.

Sampling makes several temporaries as wide as the vocabulary. On a CPU, those of one or two rows stay in the cache and
in memory that malloc reuses; those of a whole batch are mapped and faulted in anew at every step, which costs more than
the arithmetic. On a GPU larger pieces amortise the launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_ENTRIES = 1 << 17
DEVICE_ENTRIES = 1 << 24
"""A temporary of float32 takes 64 MiB, which a GPU with 4 TB/s writes in 16 us: more than a launch costs."""


def row_chunks(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices that cover `[0, num_rows)`; none when there are no rows."""
    entries = CPU_ENTRIES if device.type == "cpu" else DEVICE_ENTRIES
    step = max(1, entries // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
