"""What `bench serve` prints and saves: a table for people, one JSON object for everything else."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokenspeed import __version__
from tokenspeed.bench.http_client import RequestResult
from tokenspeed.bench.serve_args import ServeArgs
from tokenspeed.bench.stats import Summary

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token (after the first)",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
SHOWN_ERRORS = 3


def as_json(args: ServeArgs, model: str, summary: Summary) -> dict[str, Any]:
    """The result as it is printed and saved. Latencies in milliseconds; a rate of infinity is the text `inf`."""
    result: dict[str, Any] = {
        "benchmark": "serve",
        "version": __version__,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "label": args.label,
        "backend": args.backend,
        "model_id": model,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "ramp_up_strategy": args.ramp_up_strategy,
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "without_visible_tokens": summary.hidden,
        "total_input_tokens": summary.input_tokens,
        "total_cached_tokens": summary.cached_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "max_output_tokens_per_s": summary.peak_output_rate,
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for name in args.percentile_metrics:
        values = summary.distributions[name]
        result |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.median, f"std_{name}_ms": values.std}
        result |= {f"p{p:g}_{name}_ms": value for p, value in values.percentiles.items()}
    return result | {"errors": summary.errors}


def details(results: Sequence[RequestResult]) -> dict[str, Any]:
    """One entry a request, in the order in which they were numbered. Seconds."""
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len for result in results],
        "start_times": [result.started_s for result in results],
        "ttfts": [result.ttft_s for result in results],
        "itls": [result.itl_s for result in results],
        "e2els": [result.latency_s if result.error is None else None for result in results],
        "generated_texts": [result.text for result in results],
        "request_errors": [result.error for result in results],
    }


def show(args: ServeArgs, model: str, summary: Summary) -> None:
    """Print the tables."""
    console = Console(width=110)
    counts = Table(title=f"{model} at {args.url}{args.path}, {args.dataset_name}", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    rows: list[tuple[str, str]] = [
        ("completed / failed requests", f"{summary.completed} / {summary.failed}"),
        ("duration s", f"{summary.duration_s:.2f}"),
        ("input tokens (of them cached)", f"{summary.input_tokens:,} ({summary.cached_tokens:,})"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("requests/s", f"{summary.request_rate:.2f}"),
        ("output tokens/s", f"{summary.output_rate:,.1f}"),
        ("peak output tokens/s", f"{summary.peak_output_rate:,.1f}"),
        ("total tokens/s", f"{summary.total_rate:,.1f}"),
        ("peak concurrency", str(summary.peak_concurrency)),
    ]
    if summary.goodput is not None:
        rows.insert(5, (f"good requests/s ({', '.join(args.goodput)})", f"{summary.goodput:.2f}"))
    for row in rows:
        counts.add_row(*row)
    console.print(counts)
    latencies = Table(title="milliseconds")
    latencies.add_column("")
    for column in ("mean", "median", "std", *(f"P{p:g}" for p in args.metric_percentiles)):
        latencies.add_column(column, justify="right")
    for name in args.percentile_metrics:
        values = summary.distributions[name]
        numbers = (values.mean, values.median, values.std, *values.percentiles.values())
        latencies.add_row(TITLES[name], *(f"{value:.2f}" for value in numbers))
    console.print(latencies)
    if summary.hidden:
        console.print(
            f"{summary.hidden} answers showed no token before their end, so they have no TTFT, TPOT and ITL; a server "
            "without a tokenizer shows token ids to --backend tokenspeed",
            highlight=False,
        )
    for error, count in list(summary.errors.items())[:SHOWN_ERRORS]:
        console.print(f"failed {count} x: {error}", highlight=False, markup=False)


def save(args: ServeArgs, result: dict[str, Any]) -> Path:
    """Write or append the result; the file's path."""
    folder = Path(args.result_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (args.output_file or _file_name(args, result))
    line = json.dumps(result)
    if args.append_result:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    else:
        path.write_text(line + "\n", encoding="utf-8")
    return path


def _file_name(args: ServeArgs, result: dict[str, Any]) -> str:
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = re.sub(r"[^\w.-]+", "_", str(result["model_id"]).rsplit("/", 1)[-1])
    return f"{args.label or args.backend}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
