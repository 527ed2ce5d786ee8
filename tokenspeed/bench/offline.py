"""`tokenspeed bench offline`: decode and prefill speed of an engine in this process, beside what the device allows.

Decode: TPOT = (time for 152 output tokens - time for 24) / 128 of equal random prompts submitted at once, so that
prefill and the end of the run cancel out; the median over repeats. Prefill: prompts / time of whole prompts with one
output token. Greedy unless asked otherwise, end-of-sequence ignored, prefix cache off, one unmeasured run first.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from tokenspeed import __version__
from tokenspeed.bench.bound import ModelCost, model_cost
from tokenspeed.bench.device import Ceilings, measure_ceilings
from tokenspeed.bench.offline_args import LONG_LEN, SHORT_LEN, OfflineArgs, fit, needed_tokens, parse_offline
from tokenspeed.bench.offline_engine import OfflineEngine
from tokenspeed.bench.offline_report import DecodeRow, OfflineReport, PrefillRow, show
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import read_device_info
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.llm import configure
from tokenspeed.engine.run import RANK, ROLE
from tokenspeed.observability.logs import configure_logging
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.errors import ConfigError, EngineDead

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(argv: Sequence[str]) -> int:
    """Measure, print tables, then one JSON line.

    Returns:
        the exit code, 0.
    Raises:
        ConfigError, CheckpointError: for the user, in one line.
        EngineDead: the engine failed on the way.
    """
    own, wishes, given = parse_offline(argv)
    configure_logging(_log_level(wishes, given), "bench")
    with startup_phase("model.config", rank=RANK, role=ROLE):
        config, args = _configuration(own, wishes, given)
    prefill = args.prefill or ()
    engine = OfflineEngine(config, args.sampling)
    try:
        process_s = time.time() - psutil.Process().create_time()
        _check_room(args, prefill, config, engine.ready.kv_capacity_tokens)
        measured = Measurements(engine, config.model.vocab_size, args.repeats, config.seed)
        steps = [(batch, measured.decode_s(batch, args.prompt_len)) for batch in args.batch]
        forwards = [(shape, measured.forward_s(*shape)) for shape in prefill]
        num_preemptions = engine.stats().num_preemptions
        if num_preemptions:
            raise EngineDead(f"{num_preemptions} requests were preempted for memory, so the times mean nothing")
        start_s, choices = engine.start_s, engine.ready.report
    finally:
        engine.close()
    device = torch.device(config.device)
    cost = model_cost(config)
    ceilings = measure_ceilings(
        device, TORCH_DTYPES[config.dtype], read_device_info().cpu_name, with_fp8=cost.multiplies_fp8
    )
    report = OfflineReport(
        version=__version__,
        model=config.checkpoint.name,
        load_format=config.load_format,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=ceilings.device,
        num_threads=config.num_threads if config.device == "cpu" else None,
        prompt_len=args.prompt_len,
        repeats=args.repeats,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_num_batched_tokens=config.max_num_batched_tokens,
        weight_bytes=cost.weight_bytes,
        expert_bytes=cost.total_bytes - cost.weight_bytes,
        bytes_per_s=ceilings.bytes_per_s,
        flop_per_s=ceilings.flop_per_s,
        fp8_flop_per_s=ceilings.fp8_flop_per_s,
        engine_start_s=start_s,
        process_to_ready_s=process_s,
        choices=choices,
        decode=[_decode_row(batch, times, args.prompt_len, cost, ceilings) for batch, times in steps],
        prefill=[_prefill_row(shape, times, cost, ceilings) for shape, times in forwards],
    )
    show(report)
    return 0


def _log_level(wishes: EngineArgs, given: frozenset[str]) -> str:
    """Quiet, unless asked."""
    if "log_level" not in given:
        return "warning"
    return "warning" if wishes.log_level == "warn" else wishes.log_level


def _configuration(own: OfflineArgs, wishes: EngineArgs, given: frozenset[str]) -> tuple[EngineConfig, OfflineArgs]:
    """The engine's configuration with room for all shapes, and the shapes with the prefill ones settled."""
    first = configure(wishes)
    config = configure(fit(own, wishes, given, first.model, first))
    return config, replace(own, prefill=own.prefill_shapes(first.model.max_position))


def _check_room(
    args: OfflineArgs, prefill: tuple[tuple[int, int], ...], config: EngineConfig, capacity_tokens: int
) -> None:
    needed = needed_tokens(args, prefill, config.page_size)
    if needed > capacity_tokens:
        raise ConfigError(
            f"the KV cache holds {capacity_tokens} tokens, the largest shape takes {needed}; lower --batch, "
            "--prompt-len or --prefill, or give the KV cache more memory"
        )
    longest = max((length for _, length in prefill), default=0)
    if longest > config.max_num_batched_tokens:
        raise ConfigError(
            f"a step takes {config.max_num_batched_tokens} tokens (--chunked-prefill-size), so a prompt of {longest} "
            "would be split and not be one forward; raise it or lower --prefill"
        )


class Measurements:
    """Runs shapes through an engine; the prompts are fresh random ids in every run."""

    def __init__(self, engine: OfflineEngine, vocab_size: int, repeats: int, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._repeats = repeats
        self._random = random.Random(seed)

    def decode_s(self, batch: int, prompt_len: int) -> list[float]:
        """Seconds of one decode step, one value a repeat."""
        self._run(batch, prompt_len, SHORT_LEN)
        pairs = [
            (self._run(batch, prompt_len, SHORT_LEN), self._run(batch, prompt_len, LONG_LEN))
            for _ in range(self._repeats)
        ]
        times = [step_s(short, long) for short, long in pairs]
        _say(f"decode, batch {batch}: {statistics.median(times) * 1e3:.2f} ms a step")
        return times

    def forward_s(self, num_prompts: int, prompt_len: int) -> list[float]:
        """Seconds of whole prompts with one output token, one value a repeat."""
        times = [self._run(num_prompts, prompt_len, 1) for _ in range(self._repeats + 1)][1:]
        _say(f"prefill, {num_prompts}x{prompt_len}: {statistics.median(times) * 1e3:.2f} ms")
        return times

    def _run(self, number: int, prompt_len: int, output_len: int) -> float:
        prompts = [self._random.choices(range(self._vocab_size), k=prompt_len) for _ in range(number)]
        return self._engine.run(prompts, output_len)


def _say(line: str) -> None:
    """To standard error, while the tables are still to come: a run may take minutes."""
    print(line, file=sys.stderr, flush=True)


def step_s(short_run_s: float, long_run_s: float) -> float:
    """Seconds a decode step from the two runs."""
    return (long_run_s - short_run_s) / (LONG_LEN - SHORT_LEN)


def _decode_row(batch: int, times: list[float], prompt_len: int, cost: ModelCost, ceilings: Ceilings) -> DecodeRow:
    tpot_s = statistics.median(times)
    context_len = prompt_len + (SHORT_LEN + LONG_LEN) // 2  # the mean over the measured steps
    weights, kv = cost.step_bytes(batch), cost.kv_bytes(batch, context_len)
    return DecodeRow(
        batch=batch,
        tpot_ms=tpot_s * 1e3,
        tpot_ms_each=[time_s * 1e3 for time_s in times],
        output_tok_s=batch / tpot_s,
        weight_bytes=weights,
        kv_bytes=kv,
        bound_ms=weights / ceilings.bytes_per_s * 1e3,
        bound_with_kv_ms=(weights + kv) / ceilings.bytes_per_s * 1e3,
    )


def _prefill_row(shape: tuple[int, int], times: list[float], cost: ModelCost, ceilings: Ceilings) -> PrefillRow:
    number, length = shape
    forward_s = statistics.median(times)
    flop = cost.prefill_flop(number, length)
    bound_s = max(
        flop / (ceilings.fp8_flop_per_s or ceilings.flop_per_s), cost.step_bytes(number * length) / ceilings.bytes_per_s
    )
    return PrefillRow(
        num_prompts=number,
        prompt_len=length,
        forward_ms=forward_s * 1e3,
        forward_ms_each=[time_s * 1e3 for time_s in times],
        input_tok_s=number * length / forward_s,
        flop=flop,
        bound_ms=bound_s * 1e3,
    )
