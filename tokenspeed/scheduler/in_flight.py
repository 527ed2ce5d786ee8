"""Plans without a result yet, oldest first: what was planned for whom, to be found again when the result comes."""

from __future__ import annotations

from collections import deque

from tokenspeed.protocol.step import Admission, Row, SteadyRows, StepPlan, StepResult
from tokenspeed.scheduler.invariants import Planned
from tokenspeed.scheduler.steady import SteadyStep


class InFlight:
    """Numbers the plans and keeps their rows."""

    def __init__(self) -> None:
        self._plans: deque[tuple[int, list[Planned] | SteadyStep]] = deque()
        self._next_step_id = 0

    def __bool__(self) -> bool:
        return bool(self._plans)

    def send(
        self,
        planned: list[Planned] | SteadyStep,
        admissions: list[Admission],
        rows: list[Row] | SteadyRows,
        num_tokens: int,
    ) -> StepPlan:
        """The plan with these rows, from now on in flight."""
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        self._plans.append((step_id, planned))
        return StepPlan(step_id, admissions, rows, num_tokens)

    def land(self, result: StepResult) -> list[Planned] | SteadyStep:
        """What the oldest plan had, whose result this is.

        Raises:
            ValueError: it is another's, or has another number of rows (a bug of the runner).
        """
        if not self._plans or self._plans[0][0] != result.step_id:
            raise ValueError(f"a result of step {result.step_id} came out of order")
        _, planned = self._plans.popleft()
        if len(planned) != len(result.rows):
            raise ValueError(f"step {result.step_id} had {len(planned)} rows, its result has {len(result.rows)}")
        return planned

    def planned(self) -> list[Planned]:
        """The rows of all plans."""
        return [
            one
            for _, planned in self._plans
            for one in (planned.planned() if isinstance(planned, SteadyStep) else planned)
        ]
