"""What `bench offline` prints: two tables, the start, and the JSON line that holds everything."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

WIDTH = 120


@dataclass(slots=True)
class DecodeRow:
    """One batch size. `bound_ms` counts weights only, `bound_with_kv_ms` keys and values too."""

    batch: int
    tpot_ms: float
    tpot_ms_each: list[float]
    output_tok_s: float
    weight_bytes: int
    kv_bytes: int
    bound_ms: float
    bound_with_kv_ms: float
    of_bound: float = field(init=False)

    def __post_init__(self) -> None:
        self.of_bound = self.bound_ms / self.tpot_ms


@dataclass(slots=True)
class PrefillRow:
    """Whole prompts in one go. The bound is that of arithmetic, or of the weights' bytes where that is longer."""

    num_prompts: int
    prompt_len: int
    forward_ms: float
    forward_ms_each: list[float]
    input_tok_s: float
    flop: int
    bound_ms: float
    of_bound: float = field(init=False)

    def __post_init__(self) -> None:
        self.of_bound = self.bound_ms / self.forward_ms


@dataclass(slots=True, kw_only=True)
class OfflineReport:
    """The JSON line.

    Fields:
        weight_bytes: read by every step; expert_bytes: of all experts besides, of which a step reads those hit.
        engine_start_s: construction to ready; process_to_ready_s: with the interpreter's imports.
    """

    benchmark: str = "offline"
    version: str
    model: str
    load_format: str
    dtype: str
    kv_cache_dtype: str
    device: str
    num_threads: int | None
    prompt_len: int
    repeats: int
    temperature: float
    top_k: int
    top_p: float
    max_num_batched_tokens: int
    weight_bytes: int
    expert_bytes: int
    bytes_per_s: float
    flop_per_s: float
    fp8_flop_per_s: float | None
    engine_start_s: float
    process_to_ready_s: float
    choices: list[str]
    decode: list[DecodeRow]
    prefill: list[PrefillRow]


def show(report: OfflineReport) -> None:
    """Print it; the last line is JSON."""
    console = Console(width=WIDTH)
    threads = f", {report.num_threads} threads" if report.num_threads else ""
    console.print(f"{report.model} ({report.load_format}, {report.dtype}, KV {report.kv_cache_dtype})", highlight=False)
    console.print(f"{report.device}{threads}; TokenSpeed {report.version}", highlight=False)
    if report.decode:
        console.print(_decode_table(report))
    if report.prefill:
        console.print(_prefill_table(report))
    experts = f" and those of {report.expert_bytes / 1e9:.4g} GB of experts that are hit" if report.expert_bytes else ""
    console.print(
        f"weights of a step: {report.weight_bytes / 1e9:.4g} GB{experts}; measured ceilings: "
        f"{report.bytes_per_s / 1e9:.1f} GB/s, {report.flop_per_s / 1e12:.2f} TFLOP/s"
        + (f" ({report.fp8_flop_per_s / 1e12:.2f} in fp8)" if report.fp8_flop_per_s else ""),
        highlight=False,
    )
    for line in beyond_ceilings(report.decode, report.prefill, report.bytes_per_s, report.flop_per_s):
        console.print(line, highlight=False)
    console.print(
        f"start to ready: {report.engine_start_s:.2f} s (from process start {report.process_to_ready_s:.2f} s)",
        highlight=False,
    )
    print(json.dumps(asdict(report)), flush=True)


def beyond_ceilings(
    decode: list[DecodeRow], prefill: list[PrefillRow], bytes_per_s: float, flop_per_s: float
) -> list[str]:
    """A line for each table with a time below its bound: then the ceiling was measured too low, and no fraction of that
    table says what it seems to say."""
    lines = []
    if any(row.bound_with_kv_ms > row.tpot_ms for row in decode):
        lines.append(_beyond("decode", f"{bytes_per_s / 1e9:.1f} GB/s"))
    if any(row.of_bound > 1 for row in prefill):
        rates = f"{flop_per_s / 1e12:.2f} TFLOP/s or {bytes_per_s / 1e9:.1f} GB/s"
        lines.append(_beyond("prefill", rates))
    return lines


def _beyond(table: str, ceiling: str) -> str:
    return (
        f"warning: {table} went beyond 100 % of its bound: the measured ceiling, {ceiling}, is too low, because the "
        "machine was busy or the model lies in its caches; the fractions mean nothing, measure again on a quiet machine"
    )


def _decode_table(report: OfflineReport) -> Table:
    drawn = f", temperature {report.temperature:g}, top_k {report.top_k}, top_p {report.top_p:g}"
    table = Table(title=f"decode, prompts of {report.prompt_len} tokens" + (drawn if report.temperature else ""))
    for column in ("batch", "TPOT ms", "tok/s", "bound ms", "of bound", "KV GB", "bound with KV ms", "of it"):
        table.add_column(column, justify="right")
    for row in report.decode:
        table.add_row(
            str(row.batch),
            f"{row.tpot_ms:.3f}",
            f"{row.output_tok_s:,.1f}",
            f"{row.bound_ms:.3f}",
            f"{row.of_bound:.0%}",
            f"{row.kv_bytes / 1e9:.3g}",
            f"{row.bound_with_kv_ms:.3f}",
            f"{row.bound_with_kv_ms / row.tpot_ms:.0%}",
        )
    return table


def _prefill_table(report: OfflineReport) -> Table:
    table = Table(title="prefill, one forward of whole prompts")
    for column in ("prompts x tokens", "ms", "tok/s", "TFLOP/s", "bound ms", "of bound"):
        table.add_column(column, justify="right")
    for row in report.prefill:
        table.add_row(
            f"{row.num_prompts} x {row.prompt_len}",
            f"{row.forward_ms:.2f}",
            f"{row.input_tok_s:,.0f}",
            f"{row.flop / row.forward_ms / 1e9:.2f}",
            f"{row.bound_ms:.2f}",
            f"{row.of_bound:.0%}",
        )
    return table
