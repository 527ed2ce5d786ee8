"""The precisions that users are served: bfloat16, float16, e4m3 weights and an e4m3 KV cache, through the whole engine.

Every logprob is compared with that of the CPU's engine in float32 over the same stored weights, and recorded,
overlapped, chunked and cached ways of running with the plainest one. Tokens are the same but where two of them tie.

Bounds are of the norm of the differences of logprobs relative to the norm of the logprobs (`served_models.nearness`),
from the formats. A rounding to bfloat16 (8 bits) errs by 2^-9 / sqrt(3) = 0.1 %, and some 40 of them in two layers, as
a random walk, by 0.7 %; the bound is three times that, for sums that err in one direction. float16 (11 bits) has an
eighth. A rounding to e4m3 (4 bits) errs by 2.6 % of a sum's norm: activations of several rows beside e4m3 weights are
rounded so before eight matrices (0.026 * sqrt(8) = 7 %; emulated on a CPU: 2 to 3 %), keys and values in two layers
(5 %), where the float32 engine rounds them too, but some of them to the other neighbour. Weights are no part of it:
both sides hold the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from law_engine import DEVICE, Engine, Run, engine_config
from served_models import LONG, SERVED, SHORT, Nearness, nearness, requests, write_served

from tokenspeed.config.engine import EngineConfig

ON_GPU = DEVICE == "cuda"
NUM_TOKENS = 12
BF16 = {"dtype": "bfloat16"}


@dataclass(frozen=True)
class Precision:
    """Fields:
    options: of the engine; stored: those of them that the float32 engine has too.
    bound: see the module.
    on_cpu: families that run where there is no GPU; there the others would only load in another way.
    """

    options: dict[str, Any]
    bound: float
    stored: tuple[str, ...] = ()
    families: tuple[str, ...] = SERVED
    on_cpu: tuple[str, ...] = ("llama",)


DENSE = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
PRECISIONS = {
    "bf16": Precision(BF16, 0.02, on_cpu=SERVED),
    "fp16": Precision({"dtype": "float16"}, 0.003, families=DENSE, on_cpu=()),
    "fp8": Precision(BF16 | {"quantization": "fp8"}, 0.07, ("quantization",), DENSE),
    "fp8-kv": Precision(BF16 | {"kv_cache_dtype": "fp8"}, 0.05, ("kv_cache_dtype",)),
}
WORST = 3
"""A single position may be so many times as far off as all together: the norm of 20 numbers varies, and so do sums."""
TIE = 3
"""Two logits tie when their distance is within so many deviations of one."""
ROOM = {"prefix_granularity": 64, "max_total_tokens": 4096, "max_num_seqs": 16, "chunked_prefill_size": 1280}


@dataclass(frozen=True)
class Case:
    precision: Precision
    folder: str

    def config(self, **options: Any) -> EngineConfig:
        return engine_config(self.folder, **(ROOM | self.precision.options | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: write_served(tmp_path_factory.mktemp(family), family) for family in SERVED}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, family), id=f"{name}-{family}")
        for name, precision in PRECISIONS.items()
        for family in precision.families
    ],
)
def case(request: pytest.FixtureRequest, folders: dict[str, str]) -> Case:
    name, family = request.param
    precision = PRECISIONS[name]
    if not ON_GPU and family not in precision.on_cpu:
        pytest.skip(f"there is no GPU, and a CPU's engine does nothing of its own for {name} on {family}")
    return Case(precision, folders[family])


def in_turn(config: EngineConfig, *rounds: list[Any]) -> Run:
    """Rounds of requests after each other in one engine: all their texts, and the statistics of the end."""
    with Engine(config) as engine:
        runs = [engine.run(work) for work in rounds]
    return Run({key: text for run in runs for key, text in run.texts.items()}, runs[-1].stats)


@pytest.fixture(scope="module")
def truth(case: Case) -> Run:
    """The CPU's engine in float32."""
    kept = {name: case.precision.options[name] for name in case.precision.stored}
    config = engine_config(case.folder, device="cpu", **(ROOM | kept))
    return in_turn(config, requests(True, SHORT, NUM_TOKENS), requests(True, LONG, NUM_TOKENS))


@pytest.fixture(scope="module")
def plain(case: Case) -> Run:
    """Eager, whole prompts, no cache, no overlap; long prompts alone."""
    with Engine(case.config()) as engine:
        short = engine.run(requests(True, SHORT, NUM_TOKENS))
        long = [engine.run([request]) for request in requests(True, LONG, NUM_TOKENS)]
    assert max(short.stats.step_tokens) == sum(SHORT)
    assert [max(ran.stats.step_tokens) for ran in long] == list(LONG)
    return Run({key: text for ran in (short, *long) for key, text in ran.texts.items()}, short.stats)


def check(found: Nearness, bound: float) -> None:
    print(found)
    assert found.error < bound
    assert found.worst < WORST * bound
    assert found.gap < TIE * bound * found.size, "another token, and no tie"
    assert found.num_compared > 0.5 * found.num_wanted, "texts part too early to show anything"


def test_logits_are_near_those_of_float32(case: Case, plain: Run, truth: Run) -> None:
    found = nearness(plain, truth)
    assert found.error > 0, "both are the same engine"
    check(found, case.precision.bound)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
def test_recording_and_overlap_change_nothing(eager: bool, overlap: bool, case: Case, plain: Run) -> None:
    """Without logprobs, as most requests are served: tokens stay on the device. Then with them."""
    if eager and not overlap:
        pytest.skip("that is the plain way")
    config = case.config(enforce_eager=eager, disable_overlap_schedule=not overlap)
    with Engine(config) as engine:
        silent = engine.run(requests(False, SHORT, NUM_TOKENS))
        spoken = engine.run(requests(True, SHORT, NUM_TOKENS))
        report = " ".join(engine.report)
    if ON_GPU:
        assert ("decode graphs: none" in report) == eager == ("prefill graphs: none" in report)
    short = Run({key: plain.texts[key] for key in silent.texts}, plain.stats)
    for ran in (silent, spoken):
        check(nearness(ran, short), case.precision.bound)


@pytest.mark.parametrize("chunk", [16, 50])
def test_chunks_give_the_logits_of_whole_prompts(chunk: int, case: Case, plain: Run) -> None:
    ran = in_turn(case.config(chunked_prefill_size=chunk, prefix_granularity=16), requests(True, SHORT, NUM_TOKENS))
    assert max(ran.stats.step_tokens) == chunk
    check(nearness(ran, Run({key: plain.texts[key] for key in ran.texts}, plain.stats)), case.precision.bound)


def test_long_prompts_in_chunks_and_beside_decodes(case: Case, plain: Run) -> None:
    """Chunks of the long ones run beside decoding rows, recorded where steps are."""
    config = case.config(chunked_prefill_size=256, enforce_eager=False, disable_overlap_schedule=False)
    with Engine(config) as engine:
        ran = engine.run(requests(True, SHORT, NUM_TOKENS) + requests(True, LONG, NUM_TOKENS))
    assert max(ran.stats.step_tokens) == 256
    check(nearness(ran, plain), case.precision.bound)


def test_a_prefix_from_the_cache_gives_the_same_logits(case: Case, plain: Run) -> None:
    """But to the prompts whose own logprobs are asked for: they are computed whole."""
    with Engine(case.config(enable_prefix_caching=True, prefix_granularity=16)) as engine:
        engine.run(requests(True, SHORT, NUM_TOKENS))
        engine.run(requests(True, LONG, NUM_TOKENS))
        again = engine.run(requests(True, LONG, NUM_TOKENS))
        second = engine.run(requests(True, SHORT, NUM_TOKENS))
    assert second.stats.num_prefix_hit_tokens == 592 + 32 + 64
    check(nearness(Run(second.texts | again.texts, second.stats), plain), case.precision.bound)
