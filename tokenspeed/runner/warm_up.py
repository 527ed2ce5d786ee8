"""Steps that touch every kernel variant which serving can need. Knows sizes, not kernels.

Triton compiles a kernel anew for the sizes that are written into it, and, for a number it reads at run time, for
whether that number is 1 or a multiple of 16. Sizes written into kernels are rounded up to powers of two. So steps of
few well-chosen sizes stand for all. The length of the context is no such number: kernels exclude it
(`do_not_specialize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, StepPlan

GREEDY = SamplingParams(temperature=0.0, seed=0)
PREFILL_TOKENS = (2, 16, 17, 32, 33, 48, 65, 128, 512)
EXPERT_TOKENS = (4, 8, 64, 256, 1024, 2048, 4096, 8192)
"""Besides, for expert layers: tiles there are chosen by how many tokens an expert has to expect."""
CONTEXT_PAGES = 2
MANY_TOKENS = 96
CHECKED = 8
"""More than any kernel for few rows takes. The last layer of a prompt step computes only a row a request: with several
requests it meets those kernels again, and unfused."""


def representatives(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of sizes that round up to the same power of two and agree in being a multiple of 16, the first; ascending."""
    chosen: dict[tuple[int, bool], int] = {}
    for size in sorted(sizes):
        chosen.setdefault(((size - 1).bit_length(), size % 16 == 0), size)
    return tuple(sorted(chosen.values()))


def warm_up_plans(
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    page_size: int,
    num_groups: int = 1,
    has_experts: bool = False,
) -> list[StepPlan]:
    """Steps that are not recorded: single tokens of many requests, and prompts.

    They may run before the first request: pages from 0 on are overwritten, every slot is admitted anew. Each needs at
    most `plan_pages` pages, which all cache groups share: nobody reads the results.
    """
    plans: list[StepPlan] = []
    kinds = list(_kinds(max_num_seqs, max_num_batched_tokens))
    if has_experts:
        kinds += _expert_kinds(max_num_seqs, max_model_len, max_num_batched_tokens)
    for num_requests, num_tokens in kinds:
        length = min(max(CONTEXT_PAGES * page_size, num_tokens), max_model_len)
        if num_tokens <= length:
            plans.append(_plan(len(plans), num_requests, num_tokens, length, page_size, num_groups))
    return plans


def checking_plans(plans: Sequence[StepPlan]) -> list[StepPlan]:
    """A few of all kinds, where every kernel was compiled and loaded before: they would show that it was not so."""
    return list(plans[::CHECKED])


def plan_pages(plans: Sequence[StepPlan]) -> int:
    """Pages that the widest of the plans names."""
    return max((len(admission.pages[0]) for plan in plans for admission in plan.admissions), default=0)


def _kinds(max_num_seqs: int, max_num_batched_tokens: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens each)."""
    for num_requests in representatives(range(1, min(max_num_seqs, max_num_batched_tokens) + 1)):
        yield num_requests, 1
    for num_tokens in PREFILL_TOKENS:
        if num_tokens <= max_num_batched_tokens:
            yield 1, num_tokens
    for num_requests in representatives(range(2, min(max_num_seqs, max_num_batched_tokens // 2) + 1)):
        num_tokens = max(2, -(-MANY_TOKENS // num_requests))
        if num_requests * num_tokens <= max_num_batched_tokens:
            yield num_requests, num_tokens


def _expert_kinds(max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens each); as few requests as hold the tokens."""
    for total in EXPERT_TOKENS:
        num_requests = -(-total // max_model_len)
        if total <= max_num_batched_tokens and num_requests <= max_num_seqs:
            yield num_requests, total // num_requests


def _plan(step_id: int, num_requests: int, num_tokens: int, length: int, page_size: int, num_groups: int) -> StepPlan:
    pages = list(range(-(-length // page_size)))
    admissions = [
        Admission(
            slot=slot,
            request_id="warm-up",
            index=slot,
            token_ids=[0] * length,
            prompt_len=length,
            pages=(pages,) * num_groups,
            sampling=GREEDY,
        )
        for slot in range(num_requests)
    ]
    rows = [
        Row(
            slot=slot,
            start=length - num_tokens,
            num_tokens=num_tokens,
            new_pages=([],) * num_groups,
            samples=True,
            is_decode=False,  # which keeps the step from being served by a recorded one
        )
        for slot in range(num_requests)
    ]
    return StepPlan(step_id=step_id, admissions=admissions, rows=rows, num_tokens=num_requests * num_tokens)
