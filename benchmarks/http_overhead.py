"""What the HTTP server costs: the same requests through the engine in a process of their own, and through the server.

    python benchmarks/http_overhead.py --model qwen3-8b/ --requests 64 --input-len 512 --output-len 512 \
        --engine-args "--load-format dummy --skip-tokenizer-init --max-model-len 8192"

All requests are submitted at once: random token ids of a fixed seed, greedy, end-of-sequence ignored. One side runs,
then the other (one GPU holds one engine), each warmed up with a whole unmeasured round, medians of `--repeats`. Output
tokens a second count from the first request's start to the last one's end. Prints the ratio; ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import sys
import time

from serving import server

from tokenspeed.bench.http_client import open_session, stream_request
from tokenspeed.config.args import FLAGS
from tokenspeed.config.flags import parse_flags
from tokenspeed.engine.llm import LLM
from tokenspeed.protocol.sampling import SamplingParams

SEED = 0
ALLOWED_LOSS = 0.05


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=40000, help="token ids are drawn below this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-args", default="", help="flags of both sides, one string")
    parser.add_argument("--side", choices=["engine"], help="of the process that runs the engine alone")
    return parser.parse_args()


def prompts(asked: argparse.Namespace, repeat: int) -> list[list[int]]:
    rng = random.Random(SEED + repeat)
    return [[rng.randrange(10, asked.vocab_size) for _ in range(asked.input_len)] for _ in range(asked.requests)]


def engine_rates(asked: argparse.Namespace) -> list[float]:
    """Output tokens a second of each measured round, the engine on a thread of this process."""
    options, _ = parse_flags(FLAGS, shlex.split(asked.engine_args), "benchmarks/http_overhead.py")
    sampling = SamplingParams(temperature=0.0, max_tokens=asked.output_len, ignore_eos=True)
    rates = []
    with LLM(asked.model, **options) as llm:
        for repeat in range(-1, asked.repeats):
            wanted = prompts(asked, repeat)
            began = time.perf_counter()
            results = llm.generate(wanted, sampling)
            took = time.perf_counter() - began
            assert all(len(result.outputs[0].token_ids) == asked.output_len for result in results)
            if repeat >= 0:
                rates.append(asked.requests * asked.output_len / took)
    return rates


def engine_apart(asked: argparse.Namespace) -> list[float]:
    """`engine_rates` in a process of its own, which frees the device when it ends."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", "engine"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rates: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return rates


async def http_rates(asked: argparse.Namespace, url: str) -> list[float]:
    """Output tokens a second of each measured round, through /v1/completions, streamed."""
    rates = []
    async with open_session() as session:
        for repeat in range(-1, asked.repeats):
            bodies = [
                {
                    "model": asked.model,
                    "prompt": prompt,
                    "max_tokens": asked.output_len,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "return_token_ids": True,
                }
                for prompt in prompts(asked, repeat)
            ]
            results = await asyncio.gather(*(stream_request(session, f"{url}/v1/completions", body) for body in bodies))
            for result in results:
                if result.error is not None or result.output_len != asked.output_len:
                    raise SystemExit(f"asked for {asked.output_len} tokens, got {result.output_len}: {result.error}")
            took = max(result.ended_s for result in results) - min(result.started_s for result in results)
            if repeat >= 0:
                rates.append(asked.requests * asked.output_len / took)
    return rates


def main() -> None:
    asked = parse_args()
    if asked.side == "engine":
        print(json.dumps(engine_rates(asked)))
        return
    offline = statistics.median(engine_apart(asked))
    with server(asked.model, ["--served-model-name", asked.model, *shlex.split(asked.engine_args)]) as (url, _):
        http = statistics.median(asyncio.run(http_rates(asked, url)))
    share = http / offline
    print(f"{asked.requests} requests of {asked.input_len} + {asked.output_len} tokens, output tok/s")
    print(f"  engine alone {offline:10.1f}   (the bound of what the server can give)")
    print(f"  over HTTP    {http:10.1f}   {100 * share:.1f} % of it")
    print(
        json.dumps(
            {
                "benchmark": "http_overhead", "model": asked.model, "requests": asked.requests,
                "input_len": asked.input_len, "output_len": asked.output_len, "engine_tok_s": offline,
                "http_tok_s": http, "share": share, "within_5_percent": share >= 1 - ALLOWED_LOSS,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
