"""The engine's log lines: now and then `Decode batch.`; for DEBUG also a line a step, `Prefill batch.` or `Mix batch.`

The words and counts follow the public contract, so that scripts which read them keep working. The level of the lines a
step is ours: a server with long prompts would write hundreds a second. Costs nothing when INFO is off and a few
comparisons on a pure decode step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenspeed.protocol.messages import EngineStats
from tokenspeed.protocol.step import StepPlan

logger = logging.getLogger(__name__)

DECODE_INTERVAL_STEPS = 40


class StepLog:
    """Writes the lines of one engine.

    Args:
        interval_steps: pure decode steps from one `Decode batch.` line to the next.
    """

    def __init__(self, interval_steps: int = DECODE_INTERVAL_STEPS) -> None:
        self._interval_steps = interval_steps
        self._num_decode_steps = 0
        self._num_generated_tokens = 0
        self._since_s = time.monotonic()

    def note(self, plan: StepPlan, snapshot: Callable[[], EngineStats]) -> None:
        """Take account of an executed step; `snapshot` is called only when a line is written."""
        if not logger.isEnabledFor(logging.INFO):
            return
        num_decodes = plan.num_decodes
        if num_decodes < len(plan.rows):
            self._num_generated_tokens += num_decodes + sum(row.samples for row in plan.rows[num_decodes:])
            if logger.isEnabledFor(logging.DEBUG):
                self._prefill(plan, snapshot())
            return
        self._num_generated_tokens += num_decodes
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval_steps == 0:
            self._decode(snapshot())

    def resume(self) -> None:
        """Work begins after an idle time, which must not count in the throughput."""
        self._num_generated_tokens, self._since_s = 0, time.monotonic()

    def _prefill(self, plan: StepPlan, stats: EngineStats) -> None:
        prefills = [row for row in plan.rows if not row.is_decode]
        admitted = {admission.slot for admission in plan.admissions}
        kind = "Prefill" if len(prefills) == len(plan.rows) else "Mix"
        logger.debug(
            "%s batch. #new-seq: %d, #new-token: %d, #cached-token: %d, #running-req: %d, #queue-req: %d",
            kind,
            len(plan.admissions),
            sum(row.num_tokens for row in prefills),
            sum(row.start for row in prefills if row.slot in admitted),
            stats.num_running,
            stats.num_waiting + stats.num_compiling,
        )

    def _decode(self, stats: EngineStats) -> None:
        now_s = time.monotonic()
        throughput = self._num_generated_tokens / max(now_s - self._since_s, 1e-9)
        self._num_generated_tokens, self._since_s = 0, now_s
        logger.info(
            "Decode batch. #running-req: %d, #pages(active/cached/total): %d/%d/%d, page ratio: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            stats.num_running,
            stats.num_pages_used,
            stats.num_pages_cached,
            stats.num_pages_total,
            stats.num_pages_used / max(stats.num_pages_total, 1),
            throughput,
            stats.num_waiting + stats.num_compiling,
        )
