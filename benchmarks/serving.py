"""Speed through the HTTP server: time to first token, decode rate of one stream, output rate of several.

    python benchmarks/serving.py --model default --concurrency 1,8 [--vs transformers] [--plot speed.png]

Starts `tokenspeed serve` on a free port (or uses --base-url), sends random token ids with a fixed seed, greedy,
end-of-sequence ignored, so that every stream has exactly the shape asked for. Everything is warm: one full round runs
unmeasured first. With `--vs transformers` the same shapes run in `transformers` (bf16) in the same run, after the
server has been stopped, on the same threads. Prints the bandwidth bound beside the results and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from tokenspeed.bench.bound import model_cost
from tokenspeed.bench.http_client import RequestResult, Timeouts, find_model, open_session, stream_request
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.args import parse_args as parse_engine_args
from tokenspeed.engine.llm import configure

READY_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Round:
    """One concurrency: medians over repeats."""

    engine: str
    concurrency: int
    input_len: int
    output_len: int
    output_tok_s: float
    decode_tok_s: float
    ttft_ms: float


@dataclass(slots=True)
class Report:
    """What the last line holds."""

    benchmark: str = "serving"
    model: str = ""
    machine: str = ""
    ready_s: float | None = None
    read_bandwidth_gb_s: float = 0.0
    weight_bytes: int = 0
    bound_decode_tok_s: float = 0.0
    ttft_512_ms: float = 0.0
    rounds: list[Round] = field(default_factory=list)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--concurrency", default="1,8", help="comma-separated numbers of simultaneous streams")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens a stream")
    parser.add_argument("--output-len", type=int, default=128, help="generated tokens a stream")
    parser.add_argument("--ttft-len", type=int, default=512, help="prompt tokens for the time to first token")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="measure a running server instead of starting one")
    parser.add_argument("--vs", choices=["transformers"], help="run the same shapes in another engine")
    parser.add_argument("--plot", help="write a bar chart to this PNG file")
    parser.add_argument("--serve-args", default="", help="more flags for `tokenspeed serve`, one string")
    return parser.parse_args()


# ---- the server's side ----------------------------------------------------------------------------------------------


@contextmanager
def server(model: str, extra: list[str]) -> Iterator[tuple[str, float]]:
    """A running server: its address and the seconds from start to ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenspeed", "serve", model, "--port", str(port), *extra]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", asyncio.run(wait_ready(f"http://127.0.0.1:{port}", process)) - started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


async def wait_ready(base_url: str, process: subprocess.Popen[bytes]) -> float:
    """When it was ready, by the clock of `time.perf_counter`."""
    deadline = time.perf_counter() + READY_TIMEOUT_S
    async with open_session() as session:
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"the server exited with code {process.returncode} before it was ready")
            try:
                await find_model(session, base_url, 0.0)
                return time.perf_counter()
            except TimeoutError:
                await asyncio.sleep(0.02)
    raise SystemExit(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")


async def one_stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output_len: int
) -> RequestResult:
    """A request that gave exactly what was asked for."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = await stream_request(session, f"{url}/v1/completions", body)
    if result.error is not None:
        raise SystemExit(f"a request failed: {result.error}")
    if result.output_len != output_len or not result.token_times:
        raise SystemExit(f"asked for {output_len} tokens, got {result.output_len}")
    return result


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(length)]


async def measure_server(base_url: str, args: argparse.Namespace, report: Report) -> None:
    rng = random.Random(args.seed)
    async with open_session(timeouts=Timeouts(request_s=600.0)) as session:
        model = await find_model(session, base_url, 0.0)

        async def one(input_len: int, output_len: int) -> RequestResult:
            return await one_stream(session, base_url, model, random_prompt(rng, input_len), output_len)

        async def together(concurrency: int) -> tuple[float, list[RequestResult]]:
            started = time.perf_counter()
            streams = await asyncio.gather(*(one(args.input_len, args.output_len) for _ in range(concurrency)))
            return time.perf_counter() - started, list(streams)

        first_tokens = [(await one(args.ttft_len, 2)).ttft_s for _ in range(args.repeats + 1)][1:]
        report.ttft_512_ms = median(first_tokens) * 1e3
        for concurrency in concurrencies(args):
            await together(concurrency)
            rounds = [await together(concurrency) for _ in range(args.repeats)]
            streams = [stream for _, group in rounds for stream in group]
            report.rounds.append(
                Round(
                    engine="tokenspeed",
                    concurrency=concurrency,
                    input_len=args.input_len,
                    output_len=args.output_len,
                    output_tok_s=statistics.median(concurrency * args.output_len / wall for wall, _ in rounds),
                    decode_tok_s=1 / median(stream.tpot_s for stream in streams),
                    ttft_ms=median(stream.ttft_s for stream in streams) * 1e3,
                )
            )


def median(seconds: Iterable[float | None]) -> float:
    """Of values that every answer here has: `one_stream` has seen its tokens."""
    return statistics.median(value for value in seconds if value is not None)


def concurrencies(args: argparse.Namespace) -> list[int]:
    return [int(part) for part in args.concurrency.split(",")]


# ---- the other engine and the bound ---------------------------------------------------------------------------------


def measure_transformers(args: argparse.Namespace, report: Report) -> None:
    """The same shapes through `transformers.generate` in bfloat16, all prompts of a round in one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = resolve_checkpoint(args.model)
    file = checkpoint.weight_files[0]
    folder, name = os.path.split(file)
    gguf = {"gguf_file": name} if checkpoint.format == "gguf" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **gguf)
    model.eval()
    rng = random.Random(args.seed)

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - started

    for concurrency in concurrencies(args):
        walls, firsts = [], []
        for repeat in range(max(2, args.repeats // 2) + 1):
            prompts = [random_prompt(rng, args.input_len) for _ in range(concurrency)]
            first, wall = generate(prompts, 1), generate(prompts, args.output_len)
            if repeat:
                firsts.append(first)
                walls.append(wall)
        wall, first = statistics.median(walls), statistics.median(firsts)
        report.rounds.append(
            Round(
                engine="transformers bf16",
                concurrency=concurrency,
                input_len=args.input_len,
                output_len=args.output_len,
                output_tok_s=concurrency * args.output_len / wall,
                decode_tok_s=(args.output_len - 1) / (wall - first),
                ttft_ms=first * 1e3,
            )
        )


def read_bandwidth_gb_s() -> float:
    """Best of several sums over 512 MiB with all threads: what weights can be read at, gigabytes a second."""
    import torch

    block = torch.ones(2**27, dtype=torch.float32)
    best = 0.0
    for _ in range(8):
        started = time.perf_counter()
        block.sum()
        best = max(best, block.numel() * 4 / (time.perf_counter() - started))
    return best / 1e9


def weight_bytes(model: str, serve_args: list[str]) -> int:
    """Bytes of weights, as they are stored, that a decode step of one row has to read."""
    return model_cost(configure(parse_engine_args([model, *serve_args]))).step_bytes(1)


def machine() -> str:
    name = "unknown CPU"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


# ---- output ---------------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    table = Table(title=f"{report.model} on {report.machine}")
    for column in ("engine", "streams", "in/out", "output tok/s", "decode tok/s a stream", "TTFT ms", "of bound"):
        table.add_column(column, justify="right")
    for row in report.rounds:
        fraction = f"{row.decode_tok_s / report.bound_decode_tok_s:.0%}" if report.bound_decode_tok_s else "-"
        table.add_row(
            row.engine,
            str(row.concurrency),
            f"{row.input_len}/{row.output_len}",
            f"{row.output_tok_s:.1f}",
            f"{row.decode_tok_s:.1f}",
            f"{row.ttft_ms:.0f}",
            fraction,
        )
    console = Console(width=120)
    console.print(table)
    if report.ready_s is not None:
        console.print(f"start to ready: {report.ready_s:.1f} s")
    console.print(f"first token of a long prompt (--ttft-len): {report.ttft_512_ms:.0f} ms")
    console.print(
        f"bound of a decode step: {report.weight_bytes / 1e6:.1f} MB of weights at "
        f"{report.read_bandwidth_gb_s:.1f} GB/s = {report.bound_decode_tok_s:.0f} steps/s"
    )
    if any(row.decode_tok_s > report.bound_decode_tok_s for row in report.rounds):
        console.print(
            "warning: a stream was faster than the bound, so the bandwidth was measured too low (a busy machine?); "
            "measure again on a quiet machine"
        )


def plot(report: Report, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    labels = [f"{row.engine}\n{row.concurrency} streams" for row in report.rounds]
    bars = axes.bar(labels, [row.output_tok_s for row in report.rounds], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.0f")
    axes.set_ylabel("output tokens/s")
    axes.set_title(f"{report.model}, {report.machine}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_args()
    report = Report(model=args.model, machine=machine())
    report.read_bandwidth_gb_s = read_bandwidth_gb_s()
    report.weight_bytes = weight_bytes(args.model, args.serve_args.split())
    report.bound_decode_tok_s = report.read_bandwidth_gb_s * 1e9 / report.weight_bytes
    if args.base_url:
        asyncio.run(measure_server(args.base_url.rstrip("/"), args, report))
    else:
        with server(args.model, args.serve_args.split()) as (url, ready_s):
            report.ready_s = ready_s
            asyncio.run(measure_server(url, args, report))
    if args.vs == "transformers":
        measure_transformers(args, report)
    show(report)
    if args.plot:
        plot(report, args.plot)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
