"""What a step launched on a GPU leaves behind, and the result that is made of it when somebody asks.

Whoever asks waits for the step's event on his own thread: no thread is woken in between, and while the event is awaited
the processor keeps what the next launch needs. Not here: launching (`cuda_runner`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenspeed.protocol.step import Row, RowResult, SteadyResults, SteadyRows, StepPlan, StepResult, TokenLogprobs
from tokenspeed.runner.constraints import Fault
from tokenspeed.runner.prompt_logprobs import PendingPrompt
from tokenspeed.sampling.logprobs import PendingLogprobs
from tokenspeed.sampling.sampler import NAN_LOGITS


@dataclass(slots=True)
class Sampled:
    """Tokens of some rows on their way to the host.

    Fields:
        token_ids: pinned [n] int32; below 0: the logits were unusable. Another step's, later: see `tokens`.
        done: recorded behind their copy before anybody asks.
        logprobs: of the rows `logprob_rows`, which asked.
        errors: why a slot's sequence cannot go on, as its grammar sees it.
    """

    token_ids: torch.Tensor
    done: torch.cuda.Event
    logprobs: PendingLogprobs | None = None
    logprob_rows: tuple[int, ...] = ()
    errors: dict[int, Fault] = field(default_factory=dict)
    _tokens: list[int] | None = None

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self._tokens is None:
            self.done.synchronize()
        return self.tokens()

    def tokens(self) -> list[int]:
        """The same where somebody has waited for the step. Whoever takes its buffers has asked for its result before:
        from then on they are here, and the buffer and the event are not looked at any more."""
        if self._tokens is None:
            self._tokens = self.token_ids.tolist()
        return self._tokens

    @property
    def is_plain(self) -> bool:
        """True when each row has its token and there is nothing else to tell. As `tokens`."""
        return not (self.logprob_rows or self.errors) and min(self.tokens(), default=0) >= 0


class LaunchedStep:
    """A step on the device. Satisfies `runner.interface.Pending`.

    Args:
        done: recorded behind the step.
        parts: sampling rows in the plan's order, each group with its tokens.
        prompts: slot -> logprobs of its prompt.
        side: a stream for conversions, so that they do not wait for what was launched since.
    """

    def __init__(
        self,
        plan: StepPlan,
        done: torch.cuda.Event,
        parts: list[tuple[list[Row] | SteadyRows, Sampled]],
        prompts: dict[int, PendingPrompt],
        side: torch.cuda.Stream,
    ) -> None:
        self._plan = plan
        self._done = done
        self._parts = parts
        self._prompts = prompts
        self._side = side
        self._result: StepResult | None = None

    def wait(self) -> None:
        """Wait for the device. Its processor spins: a thread that sleeps comes back late, and to cold caches."""
        if self._result is None:
            self._done.synchronize()

    def result(self) -> StepResult:
        if self._result is None:
            self.wait()
            self._result = self._collect()
            self._parts, self._prompts = [], {}  # tensors that nobody needs any more
        return self._result

    def _collect(self) -> StepResult:
        plan = self._plan
        if isinstance(plan.rows, SteadyRows) and len(self._parts) == 1 and not self._prompts:
            sampled = self._parts[0][1]
            if sampled.is_plain:
                return StepResult(plan.step_id, SteadyResults(plan.rows.members, sampled.tokens()))
        return StepResult(plan.step_id, self._row_results())

    def _row_results(self) -> list[RowResult]:
        """One by one."""
        prompts: dict[int, list[TokenLogprobs]] = {}
        if self._prompts:
            with torch.inference_mode(), torch.cuda.stream(self._side):
                prompts = {slot: pending.finish() for slot, pending in self._prompts.items()}
        results = [one for part in self._parts for one in self._rows(*part, prompts)]
        if len(results) < len(self._plan.rows):  # rows that sample nothing are in no part
            found = {one.slot: one for one in results}
            results = [
                found.get(row.slot) or RowResult(row.slot, [], prompt_logprobs=prompts.get(row.slot, []))
                for row in self._plan.rows
            ]
        return results

    def _rows(
        self, rows: list[Row] | SteadyRows, sampled: Sampled, prompts: dict[int, list[TokenLogprobs]]
    ) -> list[RowResult]:
        """Results of one group of rows."""
        token_ids = sampled.tokens()
        if sampled.is_plain and not prompts:
            return [RowResult(row.slot, [token_id]) for row, token_id in zip(rows, token_ids, strict=True)]
        logprobs = self._logprobs(sampled)
        results = []
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            fault = Fault(NAN_LOGITS) if token_id < 0 else sampled.errors.get(row.slot)
            results.append(
                RowResult(
                    slot=row.slot,
                    token_ids=[] if fault else [token_id],
                    logprobs=[logprobs[index]] if index in logprobs and not fault else [],
                    prompt_logprobs=prompts.get(row.slot, []),
                    error=fault.error if fault else None,
                    error_code=fault.code if fault else None,
                )
            )
        return results

    def _logprobs(self, sampled: Sampled) -> dict[int, TokenLogprobs]:
        if sampled.logprobs is None:
            return {}
        with torch.inference_mode(), torch.cuda.stream(self._side):
            return dict(zip(sampled.logprob_rows, sampled.logprobs.finish(), strict=True))
