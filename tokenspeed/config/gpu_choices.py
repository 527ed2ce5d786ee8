"""What a GPU makes of the wishes: which GPU will do, its share of memory, the batch sizes that are recorded."""

from __future__ import annotations

from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import DeviceInfo
from tokenspeed.config.engine import Choice
from tokenspeed.config.gpu import GpuInfo
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30
MIN_CAPABILITY = (8, 0)
E4M3_CAPABILITY = (8, 9)
"""From which on a GPU converts 8-bit floats: Ada, Hopper and later; not an A100 or an A10."""
FINE_PREFILL_TOKENS = 512
MAX_PREFILL_TOKENS = 1024
"""Above so many prompt tokens the GPU needs longer for a step than the host to launch it; recorded sizes lie 64 apart
up to the first number, 128 from there on. H200, ms for a prompt of so many tokens: recorded / launched as Triton does /
by `QuickLaunch`, at 512 of every kernel, at 1024 of all but the experts':
                  512                  1024
    gpt-oss-20b   12.7 / 18.4 / 13.8   21.7 / 24.9 / 22.5
    Qwen3-8B      12.0 / 26.6 / 13.7   24.7 / 25.7 / 24.4
Launching takes the host 10 to 16 ms of it at any length, and the 21 ms of gpt-oss-20b were before its experts took
float16 tensor cores. A token of padding costs the GPU 18 or 25 us at most, less where the products' tiles of 128 have
room for it. One more size is recorded in 0.04 s; `runner.memory` has what it keeps.
"""
MAX_GRAPH_ROWS = 512
"""Above so many rows a step is bound by arithmetic, and launches no longer show."""
UNRECORDABLE_ATTENTION = ("flashinfer",)
"""Backends of `--attention-backend` that read lengths on the host, which a recorded step cannot."""


def usable_gpu(device: DeviceInfo) -> tuple[GpuInfo | None, str]:
    """The GPU that a single rank runs on, with a description of it; or None and what is missing."""
    if not device.gpus:
        return None, device.gpu_obstacle or "no GPU was found"
    gpu = device.gpus[0]
    if gpu.compute_capability < MIN_CAPABILITY:
        have, need = _dotted(gpu.compute_capability), _dotted(MIN_CAPABILITY)
        return None, f"{gpu.name} has compute capability {have}, and the kernels need {need}"
    return (
        gpu,
        f"{gpu.name}, {gpu.memory_total_bytes / GIB:.0f} GiB, compute capability {_dotted(gpu.compute_capability)}",
    )


def why_no_e4m3(gpu: GpuInfo) -> str | None:
    """None where kernels read and write 8-bit floats, otherwise the reason."""
    if gpu.compute_capability >= E4M3_CAPABILITY:
        return None
    have, need = _dotted(gpu.compute_capability), _dotted(E4M3_CAPABILITY)
    return f"{gpu.name} has compute capability {have}, and 8-bit floats (e4m3) need {need}"


def memory_utilization(args: EngineArgs, choices: list[Choice]) -> float:
    """The share of a GPU's memory that the engine may use, by the number of ranks as in the public contract: ranks
    that share layers need room for communication."""
    if args.gpu_memory_utilization is not None:
        return args.gpu_memory_utilization
    ranks = args.tensor_parallel_size * args.data_parallel_size
    share = next(share for least, share in ((16, 0.79), (8, 0.81), (4, 0.95), (2, 0.87), (1, 0.88)) if ranks >= least)
    choices.append(Choice("--gpu-memory-utilization", f"{share:g}", f"the default for {ranks} rank{'s' * (ranks > 1)}"))
    return share


def capture_sizes(args: EngineArgs, choices: list[Choice]) -> tuple[int, ...]:
    """Decode batch sizes whose steps are recorded, ascending; empty where none can be, or with `--enforce-eager`.

    Raises:
        ConfigError: sizes together with a flag that forbids recording, or none that can occur.
    """
    given = args.cudagraph_capture_sizes
    off = without_recording(args)
    if off is not None:
        for name, is_given in (
            ("--cudagraph-capture-sizes", bool(given)),
            ("--max-cudagraph-capture-size", args.max_cudagraph_capture_size is not None),
            ("--disable-cuda-graph-padding", args.disable_cuda_graph_padding),
        ):
            if is_given:
                raise ConfigError(f"{name} was given together with {off}, with which no step is recorded")
        if not args.enforce_eager:
            choices.append(Choice("--cudagraph-capture-sizes", "none", f"with {off} no step can be recorded"))
        return ()
    largest = args.max_cudagraph_capture_size
    if largest is None:
        largest = min(args.max_num_seqs, max(given)) if given else min(args.max_num_seqs, MAX_GRAPH_ROWS)
        choices.append(Choice("--max-cudagraph-capture-size", str(largest), "no larger batch gains by being recorded"))
    limit = min(largest, args.max_num_seqs)
    if not given:
        sizes = exact_ladder(limit) if args.disable_cuda_graph_padding else capture_ladder(limit)
        reason = "exact sizes" if args.disable_cuda_graph_padding else "at most 7 rows, or 1/8, of padding above 8 rows"
        choices.append(Choice("--cudagraph-capture-sizes", _shown(sizes), reason))
        return sizes
    kept = tuple(sorted({size for size in given if size <= limit}))
    dropped = tuple(sorted({size for size in given if size > limit}))
    if not kept:
        raise ConfigError(
            f"--cudagraph-capture-sizes has no size up to {limit} (--max-num-seqs {args.max_num_seqs}, "
            f"--max-cudagraph-capture-size {largest}); add smaller ones, or use --enforce-eager"
        )
    if dropped:
        reason = f"without {_shown(dropped)}: batches never exceed {limit} here"
        choices.append(Choice("--cudagraph-capture-sizes", _shown(kept), reason))
    return kept


def without_recording(args: EngineArgs) -> str | None:
    """The flag, as it is typed, with which no step is recorded."""
    if args.enforce_eager:
        return "--enforce-eager"
    if args.attention_backend in UNRECORDABLE_ATTENTION:
        return f"--attention-backend {args.attention_backend}"
    return None


def prefill_sizes(args: EngineArgs, token_budget: int, choices: list[Choice]) -> tuple[int, ...]:
    """Token counts of prompt steps that are recorded, ascending.

    Args:
        token_budget: most tokens of one step.
    Raises:
        ConfigError: flags that contradict each other, or no size that can occur.
    """
    given, most = args.prefill_graph_capture_sizes, args.prefill_graph_max_tokens
    off = without_recording(args)
    if off is None and args.disable_prefill_graph:
        off = "--disable-prefill-graph"
    elif off is None and most == 0:
        off = "--prefill-graph-max-tokens 0"
    if off is not None:
        for name, is_given in (("--prefill-graph-capture-sizes", given), ("--prefill-graph-max-tokens", most)):
            if is_given:
                raise ConfigError(f"{name} was given together with {off}, with which no prompt step is recorded")
        return ()
    if most is None:
        most = min(max(given) if given else MAX_PREFILL_TOKENS, token_budget)
        reason = (
            "the largest of the sizes asked for" if given else "launching a longer prompt costs less than running it"
        )
        choices.append(Choice("--prefill-graph-max-tokens", str(most), reason))
    limit = min(most, token_budget)
    sizes = tuple(sorted({size for size in given if size <= limit})) if given else prefill_ladder(limit)
    if given and not sizes:
        raise ConfigError(
            f"--prefill-graph-capture-sizes has no size up to {limit} (--prefill-graph-max-tokens {most}, a step takes "
            f"{token_budget} tokens); add smaller ones, or use --disable-prefill-graph"
        )
    if not given or len(sizes) < len(set(given)):
        reason = f"none above {limit} can occur" if given else "few sizes to record, and little padding"
        choices.append(Choice("--prefill-graph-capture-sizes", _shown(sizes) or "none", reason))
    return sizes


def prefill_ladder(limit: int) -> tuple[int, ...]:
    """16 32 64 128 192 ... 512 640 768 ... and `limit`: up to 128 tokens a step is bound by the bytes of the weights,
    and above 512 the steps are those of `MAX_PREFILL_TOKENS`."""
    sizes = (16, 32, *range(64, FINE_PREFILL_TOKENS, 64), *range(FINE_PREFILL_TOKENS, limit, 128))
    return tuple(size for size in sorted({*sizes, limit}) if 2 <= size <= limit)


def capture_ladder(limit: int) -> tuple[int, ...]:
    """1 2 4 8 16 24 ... 128 144 ... 256 288 ... and `limit`: steps of 1/8 of the power of two below, at least 8.

    Up to 64 rows a step is bound by the bytes of the weights, so rows of padding are nearly free there.
    """
    sizes = [size for size in (1, 2, 4) if size <= limit]
    size = 8
    while size < limit:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return tuple(sorted({*sizes, limit}))


def exact_ladder(limit: int) -> tuple[int, ...]:
    """Without padding: every size to 32, then by 32 to 256, then by 64; and `limit` itself."""
    sizes = [*range(1, 33), *range(64, 257, 32), *range(320, limit, 64)]
    return tuple(sorted({size for size in sizes if size <= limit} | {limit}))


def _shown(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
