"""Scheduler and simulated device in a loop, plain or overlapped by one step, with every output judged."""

from __future__ import annotations

from collections import deque

from simulated_device import SimulatedDevice, expected_output, logprob_at

from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.protocol.messages import AddRequest, SequenceOutput
from tokenspeed.protocol.step import StepPlan
from tokenspeed.scheduler.drafter import Drafter
from tokenspeed.scheduler.outcome import on_wire
from tokenspeed.scheduler.policy import Policy
from tokenspeed.scheduler.scheduler import Scheduler

VOCAB = 11


def groups_of(windows: tuple[int | None, ...], page_size: int, num_pages: int) -> list[GroupSpec]:
    """A cache group for each window; None = a full one."""
    return [
        GroupSpec(f"g{number}", "full" if window is None else "sliding_window", page_size, 1, num_pages, window)
        for number, window in enumerate(windows)
    ]


class SimulatedEngine:
    def __init__(
        self,
        *,
        num_pages: int = 16,
        page_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 8,
        max_model_len: int = 48,
        prefix_caching: bool = True,
        policy: Policy = "fifo",
        overlap: bool = True,
        depth: int | None = None,
        drafter: Drafter | None = None,
        check: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.cache = CacheManager(groups_of(windows, page_size, num_pages), prefix_caching, budget)
        self.scheduler = Scheduler(
            cache=self.cache,
            eos_token_ids=(0,),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            policy=policy,
            drafter=drafter,
        )
        self.device = SimulatedDevice(max_num_seqs, num_pages, page_size, budget, VOCAB, windows)
        alone = num_pages * page_size if windows == (None,) else self.cache.capacity_tokens
        self.max_len = min(max_model_len, alone)
        # The engine uses 1 and 2; nothing in the scheduler depends on it, so tests also go deeper.
        self.depth = depth or (2 if overlap else 1)
        self.check = check
        self.queue: deque[StepPlan] = deque()
        self.requests: dict[str, AddRequest] = {}
        self.news: dict[tuple[str, int], list[SequenceOutput]] = {}

    # -- operations ----------------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> None:
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.news[request.request_id, index] = []
        self._take(self.scheduler.add(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._take(self.scheduler.abort(request_id, index))

    def turn(self) -> StepPlan | None:
        """One turn of the loop: plan, queue, and apply the oldest once the pipeline is full or nothing else can run."""
        plan = self.scheduler.plan()
        self._check()
        if plan is not None:
            self.queue.append(plan)
        elif not self.queue:
            assert not self.scheduler.has_work, "deadlock: work, but no plan and no result on its way"
        if self.queue and (plan is None or len(self.queue) == self.depth):
            # Executed as late as the order allows, so that a plan changed after it was made is noticed.
            self._take(self.scheduler.apply(self.device.execute(self.queue.popleft())))
        return plan

    def run(self, max_turns: int = 100_000) -> None:
        """Turn until idle."""
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, f"not done after {max_turns} turns: livelock"
        self.check_idle()

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            news = self.news[output.request_id, output.index]
            assert not news or news[-1].finish_reason is None, "news after the terminal output"
            assert output.token_ids or output.finish_reason, "an output that says nothing"
            news.append(output)
        self._check()

    def _check(self) -> None:
        if self.check:
            self.scheduler.check()

    # -- judgement -----------------------------------------------------------------------------------------------

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token_id for output in self.news[request_id, index] for token_id in output.token_ids]

    def finish(self, request_id: str, index: int = 0) -> str | None:
        news = self.news[request_id, index]
        return news[-1].finish_reason if news else None

    def check_idle(self) -> None:
        """Everything has ended once, as it would have alone, and no page is held."""
        self.scheduler.check()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0 and not self.scheduler.has_work
        assert self.cache.num_pages_used == 0
        assert self.cache.num_pages_free + self.cache.num_pages_cached == self.cache.num_pages_total
        assert self.cache.enable_prefix_caching or not self.cache.num_pages_cached
        for (request_id, index), news in self.news.items():
            self._judge(self.requests[request_id], index, news)

    def _judge(self, request: AddRequest, index: int, news: list[SequenceOutput]) -> None:
        assert news and [o.finish_reason is not None for o in news].count(True) == 1 and news[-1].finish_reason
        reason = news[-1].finish_reason
        got = self.tokens(request.request_id, index)
        drawn = self.device.seeds.get((request.request_id, index))
        seed = request.sampling.seed if request.sampling.seed is not None else (drawn or 0) - index
        tokens, expected_reason, stop_token_id = expected_output(request, index, seed, self.max_len, VOCAB)
        if reason == "abort":
            assert got == tokens[: len(got)], "an aborted sequence said something else"
        elif drawn is None:
            assert reason == "error" and len(request.prompt_token_ids) >= self.max_len
        else:
            assert (got, reason) == (tokens, expected_reason)
            assert news[-1].stop_token_id == stop_token_id
            assert (news[-1].error is not None) == (reason == "error")
        self._judge_extras(request, index, news, got)

    def _judge_extras(self, request: AddRequest, index: int, news: list[SequenceOutput], got: list[int]) -> None:
        all_ids = request.prompt_token_ids + got
        prompt_len = len(request.prompt_token_ids)
        logprobs = [entry for output in news for entry in output.logprobs]
        if request.sampling.logprobs is None:
            assert not logprobs
        else:
            assert logprobs == on_wire([logprob_at(all_ids, prompt_len + i) for i in range(len(got))])
        prompt_logprobs = [entry for output in news for entry in output.prompt_logprobs]
        if request.sampling.prompt_logprobs is None or index or not got:
            assert not prompt_logprobs
        else:
            assert news[0].prompt_logprobs == prompt_logprobs, "not on the first output"
            assert prompt_logprobs == on_wire([logprob_at(all_ids, i) for i in range(1, prompt_len)])
        assert all(output.num_cached_tokens is None for output in news[1:])
        if got:
            assert news[0].num_cached_tokens is not None
            assert news[0].num_cached_tokens % self.cache.page_size == 0
            assert news[0].num_cached_tokens < prompt_len
