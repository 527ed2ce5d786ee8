"""`tokenspeed bench kernels`: every implementation of every operation of the registry, at the shapes of a model.

CUDA: the calls of a case are captured in one graph, and its replay is timed; what waits for the device cannot be, and
is timed call by call. CPU: the fastest of several rounds. Each row shows bytes and operations a second beside the time
that the device needs for them at its measured ceilings.
`--tune` instead finds the tiles of the expert kernels (`expert_tune`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from tokenspeed import __version__
from tokenspeed.bench.arguments import counts, integer, number, parse_all
from tokenspeed.bench.device import Ceilings, best_s, measure_ceilings
from tokenspeed.bench.expert_cases import moe_need
from tokenspeed.bench.kernel_cases import cases
from tokenspeed.bench.kernel_sampling import SAMPLERS, SAMPLING, only_compared
from tokenspeed.bench.kernel_setting import Call, Case, NotTimed, Setting
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.device import read_device_info
from tokenspeed.config.flags import check, declared_flags, flag
from tokenspeed.config.model import ModelConfig, read_model_config
from tokenspeed.kernels.ops import Recorder
from tokenspeed.kernels.registry import OPTIONAL, REQUIRED, Implementation, Need, discover
from tokenspeed.protocol.errors import ConfigError

PROG = "tokenspeed bench kernels"
_ABOUT = "Times every implementation of the kernel registry at the shapes of a model, beside the device's bound."
_WHAT = "What is timed"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
OPS = (*(op for op in REQUIRED + OPTIONAL if op != "recorder"), SAMPLING)
FP8_OP = "fp8_linear"
_NOT_TUNED = ("ops", "kv_cache_dtype", "context", "page_size", "repeats", "num_threads")
"""Flags that say nothing about expert kernels."""
MIN_CALLS = 16
"""Calls in a graph at least, so that the launch of the graph vanishes in them."""
PAGE_TOKENS = {"cpu": 16, "cuda": 64}
"""What engines use unless told otherwise (`--prefix-granularity`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArgs:
    """See each flag's help.

    Raises:
        ConfigError: on construction, for a value outside a flag's limits.
    """

    model_config: str = flag(
        "default", "--model-config", _WHAT, "A config.json, a model's folder, .gguf file or hub id; only its shapes.",
        metavar="FILE",
    )  # fmt: skip
    ops: str | None = flag(
        None, "--ops", _WHAT, f"Operations, separated by commas: {', '.join(OPS)}.", metavar="OP,OP,...",
        default_text="all",
    )  # fmt: skip
    device: str = flag("auto", "--device", _WHAT, "Where they run.", choices=("auto", "cpu", "cuda"))
    dtype: str = flag("bfloat16", "--dtype", _WHAT, "Of weights and activations.", choices=tuple(DTYPES))
    kv_cache_dtype: str = flag(
        "auto", "--kv-cache-dtype", _WHAT, "Of the KV cache; `auto` is --dtype, `fp8` is `fp8_e4m3`.",
        choices=("auto", "fp8", "fp8_e4m3"),
    )  # fmt: skip
    rows: tuple[int, ...] = flag(
        (1, 4, 16, 64, 256), "--rows", _WHAT, "Decode rows; `none` for none.", parse=counts, metavar="N,N,...",
        default_text="1,4,16,64,256",
    )  # fmt: skip
    prefill: tuple[int, ...] = flag(
        (1024,), "--prefill", _WHAT, "Tokens of a step with a prompt, or `none`.", parse=counts, metavar="N,N,...",
        default_text="1024",
    )  # fmt: skip
    context: int = flag(
        1024, "--context", _WHAT, "Tokens that a decoding request has, and those before a chunk of a prompt.",
        parse=integer, metavar="TOKENS", at_least=1,
    )  # fmt: skip
    page_size: int | None = flag(
        None, "--page-size", _WHAT, "Tokens a page of the KV cache.", parse=integer, metavar="TOKENS", at_least=1,
        default_text="that of engines: " + ", ".join(f"{size} on {name}" for name, size in PAGE_TOKENS.items()),
    )  # fmt: skip
    repeats: int = flag(5, "--repeats", _WHAT, "Rounds; the fastest counts.", parse=integer, metavar="N", at_least=1)
    time_limit: float | None = flag(
        None, "--time-limit", _WHAT, "Seconds after which nothing more is begun; what is left out is named.",
        parse=number, metavar="SECONDS", at_least=1, default_text="none",
    )  # fmt: skip
    tune: bool = flag(
        False, "--tune", _WHAT, "Find the fastest tiles of the expert kernels for this GPU and the model's experts, at "
                                "--rows and --prefill tokens, and write them to --table.", kind="on",
    )  # fmt: skip
    table: str | None = flag(
        None, "--table", _WHAT, "File of --tune; entries of other shapes in it stay. Engines read the one of their GPU "
                                "in tokenspeed/kernels/triton/tables.",
        metavar="FILE", default_text="<GPU>.json here",
    )  # fmt: skip
    num_threads: int | None = flag(
        None, "--num-threads", _WHAT, "CPU threads.", parse=integer, metavar="N", at_least=1,
        default_text="physical cores that this process may use",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for declared in declared_flags(KernelArgs):
            check(declared, getattr(self, declared.field_name))
        if self.table is not None and not self.tune:
            raise ConfigError("--table is the file that --tune writes; add --tune, or leave it out")
        for declared in declared_flags(KernelArgs) if self.tune else ():
            if declared.field_name in _NOT_TUNED and getattr(self, declared.field_name) != declared.default:
                raise ConfigError(f"{declared.flag.names[0]} has no effect on --tune; leave one of them out")

    def chosen_ops(self) -> tuple[str, ...]:
        """
        Raises:
            ConfigError: an operation that the registry does not have.
        """
        if self.ops is None:
            return OPS
        names = tuple(self.ops.split(","))
        for name in names:
            if name not in OPS:
                raise ConfigError(f"--ops has {name!r}, the operations are: {', '.join(OPS)}")
        return names


@dataclass(slots=True)
class KernelRow:
    """One implementation at one shape. `method`: graph, eager (on CUDA, where it could not be captured) or cpu."""

    op: str
    shape: str
    rows: int
    implementation: str
    is_chosen: bool
    method: Literal["graph", "eager", "cpu"]
    time_us: float
    gb_per_s: float
    tflop_per_s: float
    bound_us: float
    of_bound: float


@dataclass(slots=True, kw_only=True)
class KernelReport:
    """The JSON line. `not_timed`: operation, implementation, and the reason."""

    benchmark: str = "kernels"
    version: str = __version__
    model: str
    device: str
    dtype: str
    kv_cache_dtype: str
    page_size: int
    bytes_per_s: float
    flop_per_s: float
    fp8_flop_per_s: float | None = None
    rows: list[KernelRow] = field(default_factory=list)
    not_timed: list[str] = field(default_factory=list)


@torch.inference_mode()
def run(argv: Sequence[str]) -> int:
    """Measure, print a table, then one JSON line.

    Raises:
        ConfigError, CheckpointError: for the user, in one line.
    """
    args = KernelArgs(**parse_all(declared_flags(KernelArgs), argv, PROG, _ABOUT))
    ops = args.chosen_ops()
    checkpoint = resolve_checkpoint(args.model_config, load_format="dummy")
    config = read_model_config(checkpoint)
    device, info = _device(args.device), read_device_info()
    if device.type == "cpu":
        torch.set_num_threads(args.num_threads or info.num_physical_cores)
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    need = Need(device, dtype, dtype if args.kv_cache_dtype == "auto" else torch.float8_e4m3fn)
    if args.tune:
        return _tune(args, config, need)
    deadline = time.monotonic() + (args.time_limit or float("inf"))
    page_size = args.page_size or PAGE_TOKENS[device.type]
    setting = Setting(config, device, dtype, args.rows, args.prefill, args.context, page_size, need.kv_dtype)
    has_fp8 = any(found.op == FP8_OP and found.why_not(need) is None for found in discover())
    ceilings = measure_ceilings(device, need.dtype, info.cpu_name, with_fp8=has_fp8 and FP8_OP in ops)
    report = KernelReport(
        model=checkpoint.name,
        device=ceilings.device,
        dtype=args.dtype,
        kv_cache_dtype=str(setting.pool_dtype).removeprefix("torch."),
        page_size=page_size,
        bytes_per_s=ceilings.bytes_per_s,
        flop_per_s=ceilings.flop_per_s,
        fp8_flop_per_s=ceilings.fp8_flop_per_s,
    )
    timer = Timer(need, args.repeats)
    for op in ops:
        measure_op(op, setting, need, timer, ceilings, report, deadline)
    show(report)
    return 0


def _tune(args: KernelArgs, config: ModelConfig, need: Need) -> int:
    if need.device.type != "cuda":
        raise ConfigError("--tune measures kernels of a GPU: torch must find one, and --device must not be cpu")
    wanted = moe_need(config, need.device, need.dtype)
    if wanted is None:
        raise ConfigError(f"--tune finds tiles of expert kernels; {args.model_config} has no experts")
    # Triton is an optional dependency.
    from tokenspeed.bench.expert_tune import tune_to_file

    tune_to_file(wanted, tuple(sorted({*args.rows, *args.prefill})), args.time_limit, args.table, need)
    return 0


def _device(choice: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if choice == "cuda" and not has_cuda:
        raise ConfigError("--device is cuda, but torch finds no GPU here; use --device cpu")
    return torch.device("cuda" if choice == "cuda" or (choice == "auto" and has_cuda) else "cpu")


class Timer:
    """Times calls on one device; see the module."""

    def __init__(self, need: Need, repeats: int) -> None:
        self._device = need.device
        self._repeats = repeats
        self._need = need

    def _new_recorder(self) -> Recorder | None:
        """One for each measurement: memory whose graph is gone, or whose capture failed, takes no other."""
        able = [found for found in discover() if found.op == "recorder" and found.why_not(self._need) is None]
        return able[0].make(self._need) if able else None

    def time_s(self, calls: list[Call], can_record: bool = True) -> tuple[float, Literal["graph", "eager", "cpu"]]:
        """Seconds a call, and how that was measured.

        Args:
            can_record: see `Implementation`.
        """
        if self._device.type == "cuda":
            calls = calls * -(-MIN_CALLS // len(calls))

        def once() -> None:
            for call in calls:
                call()

        if self._device.type == "cpu":
            return best_s(once, self._device, self._repeats) / len(calls), "cpu"
        once()
        recorder = self._new_recorder() if can_record else None
        if recorder is not None:
            try:
                with recorder.record() as graph:
                    once()
            except RuntimeError:
                torch.cuda.synchronize()  # an implementation that asks the host cannot be captured
                random = torch.cuda.default_generators[torch.cuda.current_device()]
                random.graphsafe_set_state(random.clone_state())  # it still counts for the graph that is not to be
            else:
                return best_s(graph.replay, self._device, self._repeats) / len(calls), "graph"
        return best_s(once, self._device, self._repeats) / len(calls), "eager"


def measure_op(
    op: str,
    setting: Setting,
    need: Need,
    timer: Timer,
    ceilings: Ceilings,
    report: KernelReport,
    deadline: float = float("inf"),
) -> None:
    """Time all implementations of one operation; adds to `report`. Begins nothing after `deadline` (time.monotonic)."""
    found = cases(setting, op)
    if found is None:
        report.not_timed.append(f"{op}: no shapes are declared for it (bench/kernel_cases.py)")
        return
    able: list[Implementation] = []
    for implementation in (*discover(), *SAMPLERS):
        if implementation.op == op:
            reason = implementation.why_not(need) or only_compared(implementation)
            if reason is None:
                able.append(implementation)
            else:
                report.not_timed.append(f"{op} {implementation.name}: {reason}")
    callables = [implementation.make(need) for implementation in able]
    for case in found:
        for place, (implementation, made) in enumerate(zip(able, callables, strict=True)):
            if time.monotonic() > deadline:
                report.not_timed.append(f"{op} {implementation.name}, {case.shape}, {case.rows} rows: --time-limit")
                continue
            try:
                time_s, method = timer.time_s(case.make(made), implementation.can_record)
            except NotTimed as reason:
                line = f"{op} {implementation.name}, {case.rows} rows: {reason}"
                if line not in report.not_timed:
                    report.not_timed.append(line)
                continue
            report.rows.append(_row(case, implementation.name, place == 0, method, time_s, ceilings))


def _row(
    case: Case,
    name: str,
    is_chosen: bool,
    method: Literal["graph", "eager", "cpu"],
    time_s: float,
    ceilings: Ceilings,
) -> KernelRow:
    rate = ceilings.fp8_flop_per_s if case.op == FP8_OP else None
    bound_s = max(case.num_bytes / ceilings.bytes_per_s, case.flop / (rate or ceilings.flop_per_s))
    return KernelRow(
        op=case.op,
        shape=case.shape,
        rows=case.rows,
        implementation=name,
        is_chosen=is_chosen,
        method=method,
        time_us=time_s * 1e6,
        gb_per_s=case.num_bytes / time_s / 1e9,
        tflop_per_s=case.flop / time_s / 1e12,
        bound_us=bound_s * 1e6,
        of_bound=bound_s / time_s,
    )


def show(report: KernelReport) -> None:
    """Print it; the last line is JSON."""
    table = Table(title=f"{report.model}, {report.dtype}, {report.device} (* = what engines use)")
    for column in ("op", "shape", "rows", "implementation"):
        table.add_column(column)
    for column in ("us", "GB/s", "TFLOP/s", "bound us", "of bound"):
        table.add_column(column, justify="right")
    for row in report.rows:
        mark = " *" if row.is_chosen else ""
        note = " (eager)" if row.method == "eager" else ""
        table.add_row(
            row.op,
            row.shape,
            str(row.rows),
            row.implementation + mark + note,
            f"{row.time_us:.2f}",
            f"{row.gb_per_s:.1f}",
            f"{row.tflop_per_s:.3f}" if row.tflop_per_s else "-",
            f"{row.bound_us:.2f}",
            f"{row.of_bound:.0%}",
        )
    console = Console(width=140)
    console.print(table)
    for line in report.not_timed:
        console.print(f"not timed: {line}", highlight=False)
    console.print(
        f"measured ceilings: {report.bytes_per_s / 1e9:.1f} GB/s, {report.flop_per_s / 1e12:.2f} TFLOP/s"
        + (f" ({report.fp8_flop_per_s / 1e12:.2f} in fp8)" if report.fp8_flop_per_s else ""),
        highlight=False,
    )
    print(json.dumps(asdict(report)), flush=True)
