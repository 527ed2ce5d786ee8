"""The largest steps that can come, made up to be measured: nobody reads what they compute.

    many prompts   the whole token budget, in as many prompts as can end in one step: the most rows of activations, and
                   the most rows of logits
    long prompts   the whole token budget, in as few prompts as can be: attention may take another way, with libraries
                   and copies of its own
    decodes        a token of as many requests as may run, or as the largest recorded step holds

All rows ask for everything that costs memory: filters, penalties, banned tokens, a bias and log-probabilities. All
tokens share page 0, so that the trial needs a pool of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.config.engine import EngineConfig
from tokenspeed.protocol.sampling import MAX_LOGPROBS, SamplingParams
from tokenspeed.protocol.step import Admission, Row, StepPlan
from tokenspeed.runner.prompt_logprobs import ROWS

NUM_PAGES = 1
PLAIN = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
"""What a recorded step does for a row by itself."""
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=MAX_LOGPROBS,
    seed=0,
)


def many_prompts_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """The first prompt as long as the budget lets it be, and log-probabilities of its tokens as well."""
    lengths = many_lengths(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len - 1)
    return _step(lengths, 0, config.page_size, num_groups, EVERYTHING, num_prompt_logprobs=1)


def long_prompts_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """Whole prompts of one length."""
    lengths = long_lengths(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len - 1)
    return _step(lengths, 0, config.page_size, num_groups, EVERYTHING)


def decode_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """A step of as many rows as can come."""
    count = max(min(config.max_num_seqs, config.max_num_batched_tokens), *config.capture_sizes, 1)
    return _step([1] * count, 1, config.page_size, num_groups, EVERYTHING)


def recorded_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """What the largest decode graph holds, launched one by one."""
    return _step([1] * max(config.capture_sizes), 1, config.page_size, num_groups, PLAIN)


def smallest_step(config: EngineConfig, num_groups: int) -> StepPlan:
    """A token of one request that asks for everything."""
    return _step([1], 1, config.page_size, num_groups, EVERYTHING)


def long_lengths(budget: int, max_num_seqs: int, longest: int) -> list[int]:
    """As few prompts as fill the budget but for a token each."""
    count = min(max_num_seqs, -(-budget // longest))
    return [min(longest, budget // count)] * count


def many_lengths(budget: int, max_num_seqs: int, longest: int) -> list[int]:
    """As many prompts as the budget has room for, each as long as it leaves after a token for each of those behind."""
    lengths: list[int] = []
    left = budget
    for behind in reversed(range(min(max_num_seqs, budget))):
        lengths.append(min(longest, left - behind))
        left -= lengths[-1]
    return lengths


def _step(
    lengths: Sequence[int],
    start: int,
    page_size: int,
    num_groups: int,
    sampling: SamplingParams,
    num_prompt_logprobs: int | None = None,
) -> StepPlan:
    """Rows of `lengths` tokens behind `start` others.

    Args:
        num_prompt_logprobs: alternatives for each prompt token of the first row.
    """
    banned = (0,) if sampling.min_tokens else ()
    admissions = []
    for slot, length in enumerate(lengths):
        wanted, end = sampling, start + length
        if slot == 0 and num_prompt_logprobs is not None:
            wanted = msgspec.structs.replace(sampling, prompt_logprobs=num_prompt_logprobs)
        pages = [0] * -(-end // page_size)
        # Log-probabilities of a prompt are computed piece by piece, and all pieces need what the first does. The rest
        # counts as output, which is what a preempted sequence has.
        prompt_len = min(end, ROWS + 1)
        admissions.append(Admission(slot, "trial", slot, [0] * end, prompt_len, (pages,) * num_groups, wanted, banned))
    rows = [Row(slot, start, length, ([],) * num_groups, True, False) for slot, length in enumerate(lengths)]
    return StepPlan(0, admissions, rows, sum(lengths))
