"""What the scheduler's tests write requests and results with."""

from __future__ import annotations

from simulated_device import EOS
from simulated_engine import VOCAB

from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import RowResult, StepPlan, StepResult
from tokenspeed.scheduler.scheduler import Scheduler


def request(
    name: str,
    prompt_len: int = 4,
    *,
    max_tokens: int = 6,
    n: int = 1,
    priority: int = 0,
    first: int = 1,
    salt: str | None = None,
    prompt_logprobs: int | None = None,
    ignore_eos: bool = True,
) -> AddRequest:
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
    )
    prompt = [(first + i) % VOCAB for i in range(prompt_len)]
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, priority=priority, cache_salt=salt)


def shape(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(start, num_tokens, is_decode) of the rows."""
    return [] if plan is None else [(row.start, row.num_tokens, row.is_decode) for row in plan.rows]


def scheduler_of(num_pages: int = 64, page_size: int = 4, slots: int = 4, **limits: int) -> Scheduler:
    """A bare scheduler whose results the test writes itself."""
    return Scheduler(
        cache=CacheManager([GroupSpec("full", "full", page_size, 1, num_pages)], True),
        eos_token_ids=(EOS,),
        max_num_seqs=slots,
        max_num_batched_tokens=limits.get("budget", 64),
        max_model_len=limits.get("max_model_len", 64),
    )


def answer(plan: StepPlan | None, token_id: int = 5) -> StepResult:
    assert plan is not None
    return StepResult(plan.step_id, [RowResult(row.slot, [token_id] if row.samples else []) for row in plan.rows])
