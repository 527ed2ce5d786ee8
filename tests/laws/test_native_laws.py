"""Laws of the native CPU kernels (bfloat16, quantized weights, step graphs): equal to the last bit, or not equal.

On the embedded model, whose weights stay quantized. Needs a C compiler.
"""

from __future__ import annotations

import random

import pytest
import torch
from law_engine import Run, engine_config, run

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import EngineConfig
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.protocol.messages import AddRequest
from tokenspeed.protocol.sampling import SamplingParams


def requests(lengths: list[int], max_tokens: int) -> list[AddRequest]:
    rng = random.Random(2)
    return [
        AddRequest(
            request_id=str(number),
            prompt_token_ids=[rng.randrange(49000) for _ in range(length)],
            sampling=SamplingParams(temperature=number % 2, seed=number, max_tokens=max_tokens, logprobs=2),
        )
        for number, length in enumerate(lengths)
    ]


def bits(ran: Run) -> dict[tuple[str, int], list[tuple[int, float, list[int], list[float]]]]:
    """Every token with its logprobs, unrounded."""
    return {
        key: [(one.token_id, one.logprob, one.top_ids, one.top_logprobs) for one in text.logprobs]
        for key, text in ran.texts.items()
    }


@pytest.fixture(scope="module")
def graphs(default_checkpoint: Checkpoint) -> Run:
    """Recorded steps; short and long prompts enter in chunks, beside decodes of those that came first."""
    ops, report = select_ops(Need(torch.device("cpu"), torch.bfloat16))
    if ops.recorder is None:
        pytest.skip(report[-1])
    return run(config(), WORK)


WORK = requests([3, 9, 30, 70, 33, 1], 14)


def config(**options: object) -> EngineConfig:
    plain = {"dtype": "bfloat16", "max_model_len": 256, "max_total_tokens": 1024, "prefix_granularity": 16}
    return engine_config("default", device="cpu", **(plain | {"chunked_prefill_size": 40} | options))


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"disable_overlap_schedule": False}], ids=str)
def test_bits_do_not_depend_on_recording_and_overlap(options: dict[str, object], graphs: Run) -> None:
    """The steps are the same ones, so nothing may differ, be it by a rounding."""
    other = run(config(**options), WORK)
    assert other.stats.step_tokens == graphs.stats.step_tokens
    assert bits(other) == bits(graphs)


@pytest.mark.parametrize("number", range(len(WORK)))
def test_bits_do_not_depend_on_the_batch(number: int, graphs: Run, together: Run) -> None:
    """The same seed gives the same text, alone or among strangers, short prompt or long."""
    alone = run(config(chunked_prefill_size=256), WORK[number : number + 1])
    assert max(alone.stats.step_tokens) < max(together.stats.step_tokens)
    assert bits(alone)[str(number), 0] == bits(together)[str(number), 0]


@pytest.fixture(scope="module")
def together(graphs: Run) -> Run:
    return run(config(chunked_prefill_size=256), WORK)


def test_more_sequences_than_the_kernels_have_rows(graphs: Run) -> None:
    """They decode in turns of as many rows as the quantized kernels serve (regression: they went dense together)."""
    many = requests([5] * 30, 6)
    crowd = run(config(chunked_prefill_size=256), many)
    alone = run(config(chunked_prefill_size=256), many[7:8])
    assert bits(alone)["7", 0] == bits(crowd)["7", 0]
