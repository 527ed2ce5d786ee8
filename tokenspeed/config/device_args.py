"""The flags about where and with which kernels a model runs; see `args`."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.config import attention_choices, moe_choices
from tokenspeed.config.flags import flag, integer, number
from tokenspeed.config.server_args import ServerArgs

DEVICE = "Device and kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArgs(ServerArgs):
    """See `args.EngineArgs`."""

    device: str = flag(
        "auto",
        "--device",
        DEVICE,
        "Where the model runs. `auto` takes an NVIDIA GPU of compute capability 8.0 or later, else the CPU.",
        choices=("auto", "cpu", "cuda"),
        refused_choices={"rocm": "AMD GPUs are not supported yet"},
    )
    num_threads: int | None = flag(
        None,
        "--num-threads",
        DEVICE,
        "CPU threads that compute the model.",
        parse=integer,
        metavar="N",
        at_least=1,
        at_most=1024,
        default_text="physical cores that this process may use",
        only_on="cpu",
    )
    attention_backend: str = flag(
        "auto",
        "--attention-backend",
        DEVICE,
        "Attention kernels: our own are `triton` on a GPU and `paged` on a CPU; `fa3`, `fa4` and `flashinfer` use "
        "those packages, and have not been verified with them. `auto` takes our own where they can serve the model; "
        "`mha` stands for `auto`.",
        choices=attention_choices.NAMES.shown,
        checked_with_device=True,
    )
    moe_backend: str = flag(
        "auto",
        "--moe-backend",
        DEVICE,
        "Kernels of expert layers: our own are `triton` on a GPU and `torch` on a CPU.",
        choices=moe_choices.NAMES.shown,
        checked_with_device=True,
    )
    grammar_backend: str = flag(
        "auto",
        "--grammar-backend --guided-decoding-backend",
        DEVICE,
        "Library that keeps structured output to its grammar. `none`: such requests are refused.",
        choices=("auto", "xgrammar", "llguidance", "none"),
        refused_choices={"outlines": "use xgrammar or llguidance", "guidance": "the name here is llguidance"},
        default_text="`xgrammar` when it is installed, else `llguidance`, else `none`",
    )
    grammar_compile_timeout_secs: float = flag(
        30.0,
        "--grammar-compile-timeout-secs",
        DEVICE,
        "Seconds that compiling one grammar may take; one that needs longer is answered 400.",
        parse=number,
        metavar="SECONDS",
        at_least=0.1,
        at_most=600,
    )
    disable_any_whitespace: bool = flag(
        False,
        "--disable-any-whitespace",
        DEVICE,
        "JSON of structured output has one fixed layout. Otherwise the model may lay it out, with up to 16 blanks and "
        "line breaks in a row.",
        kind="on",
    )
    enforce_eager: bool = flag(
        False, "--enforce-eager", DEVICE, "Do not record steps; run operation by operation.", kind="on"
    )
    cudagraph_capture_sizes: tuple[int, ...] = flag(
        (),
        "--cudagraph-capture-sizes",
        DEVICE,
        "Decode batch sizes that are recorded as CUDA graphs; others are padded to the next one. Sizes above "
        "`--max-num-seqs` or `--max-cudagraph-capture-size` are dropped.",
        kind="values",
        parse=integer,
        metavar="ROWS",
        at_least=1,
        default_text="1 2 4 8, then steps of 8, and of an eighth above 128",
        only_on="cuda",
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "--max-cudagraph-capture-size",
        DEVICE,
        "Largest decode batch that is recorded; larger ones run operation by operation.",
        parse=integer,
        metavar="ROWS",
        at_least=1,
        default_text="`--max-num-seqs`, at most 512",
        only_on="cuda",
    )
    disable_cuda_graph_padding: bool = flag(
        False,
        "--disable-cuda-graph-padding",
        DEVICE,
        "Replay a CUDA graph only for exactly its batch size.",
        kind="on",
        only_on="cuda",
    )
    disable_prefill_graph: bool = flag(
        False,
        "--disable-prefill-graph",
        DEVICE,
        "Do not record small prompt steps; run them operation by operation.",
        kind="on",
        only_on="cuda",
    )
    prefill_graph_max_tokens: int | None = flag(
        None,
        "--prefill-graph-max-tokens",
        DEVICE,
        "Most prompt tokens of a step that is recorded; 0 records none.",
        parse=integer,
        metavar="TOKENS",
        at_least=0,
        default_text="1024, or the largest of `--prefill-graph-capture-sizes`",
        only_on="cuda",
    )
    prefill_graph_capture_sizes: tuple[int, ...] = flag(
        (),
        "--prefill-graph-capture-sizes --prefill-graph-capture-token-sizes",
        DEVICE,
        "Token counts of prompt steps that are recorded as CUDA graphs, each for at most 8 requests; others are padded "
        "to the next one. Sizes above `--prefill-graph-max-tokens` are dropped.",
        kind="values",
        parse=integer,
        metavar="TOKENS",
        at_least=2,
        default_text="16 32 64 128, then steps of 64 up to 512, of 128 above",
        only_on="cuda",
    )
