"""What the scheduler counts since it started, for metrics and log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenspeed.cache.manager import CacheManager
from tokenspeed.protocol.messages import EngineStats

_MAX_STEP_SAMPLES = 4096  # forwards remembered between two snapshots


@dataclass(slots=True)
class Counters:
    """See the fields of the same names in `EngineStats`. `step_tokens` starts anew with each snapshot."""

    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_row_errors: int = 0
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_SAMPLES))

    def snapshot(self, cache: CacheManager, num_running: int, num_waiting: int) -> EngineStats:
        """The numbers now, with what the cache holds."""
        step_tokens = list(self.step_tokens)
        self.step_tokens.clear()
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_pages_total=cache.num_pages_total,
            num_pages_used=cache.num_pages_used,
            num_pages_cached=cache.num_pages_cached,
            num_preemptions=self.num_preemptions,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            step_tokens=step_tokens,
            num_nan_aborted=self.num_row_errors,
        )
