"""What a user reads when a GPU's memory runs out: bytes needed, bytes there, and the flags that would make it fit.

Memory runs out in one of five stages. All but the last are a matter of configuration, found at the start; a step that
fails while serving keeps its own kind of error, because what filled the GPU may have been another process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tokenspeed.config.engine import EngineConfig
from tokenspeed.protocol.errors import ConfigError

GIB = 2**30
MAX_SENSIBLE_UTILIZATION = 0.97
Stage = Literal["load", "trial", "pool", "capture", "step"]

DOING: dict[Stage, str] = {
    "load": "loading the weights",
    "trial": "running the largest step beside the weights",
    "pool": "allocating the KV pool",
    "capture": "recording steps",
    "step": "running a step",
}
_TRIED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
_RESOURCE = re.compile(r"out of resource: ([a-z ]+), Required: (\d+), Hardware limit: (\d+)")
"""As Triton words it, which need not be installed where this is imported."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""In errors of CUDA, Triton and the libraries, which do not ask torch's allocator."""


class MemoryErrors:
    """Makes of an error for want of memory one that a user can act on.

    Args:
        config: whose flags the remedies depend on; None = those that always help.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self._config = config

    @contextmanager
    def during(self, stage: Stage, needed_bytes: Callable[[], int] | None = None) -> Iterator[None]:
        """Within: memory that runs out, of the GPU or of a kernel's program, is a `ConfigError`; other errors pass.

        Args:
            needed_bytes: what the stage takes, as far as that is known; asked when memory has run out.
        """
        before = torch.cuda.memory_reserved()
        try:
            yield
        except Exception as error:
            if (lacking := lacking_resource(error)) is not None:
                raise ConfigError(f"{DOING[stage]}: {lacking}; {', or '.join(_smaller(self._config))}") from error
            if not is_out_of_memory(error):
                raise
            known = needed_bytes() if needed_bytes is not None else 0
            raise ConfigError(self._text(stage, error, known, before)) from error

    def of_step(self, error: Exception) -> Exception:
        """The error of a step that failed while serving: the same, or the same kind with bytes and flags."""
        if not is_out_of_memory(error):
            return error
        told = torch.OutOfMemoryError(self._text("step", error, 0, torch.cuda.memory_reserved()))
        told.__cause__ = error
        return told

    def _text(self, stage: Stage, error: Exception, known: int, before: int) -> str:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        needed = max(known, reserved - before + tried_bytes(error))
        least = f"at least {gib(needed)} needed" if needed else "more memory needed"
        there = f"{gib(free)} of {gib(total)} free ({gib(reserved)} held by this process)"
        return (
            f"the GPU's memory ran out while {DOING[stage]}: {least}, {there}; "
            f"{', or '.join(remedies(stage, self._config))}"
        )


def remedies(stage: Stage, config: EngineConfig | None) -> list[str]:
    """What a user can do about a stage that found too little memory, the most effective first."""
    found: list[str] = []
    if stage in ("load", "trial"):
        found += quantizing(config)
    if stage in ("trial", "step"):
        found.append("lower --chunked-prefill-size or --max-num-seqs (a smaller largest step)")
    if stage == "capture":
        found.append("lower --max-cudagraph-capture-size or --prefill-graph-max-tokens")
        found.append("record nothing, with --enforce-eager")
    if stage in ("pool", "capture", "step"):
        found.append(f"lower {_size_flag(config)} (a smaller KV pool)")
    if stage in ("load", "trial") or not found:
        found.append("end other processes that use the GPU, or take a smaller model")
    return found


def quantizing(config: EngineConfig | None) -> list[str]:
    """Flags with which the weights take half, where checkpoint and GPU allow that."""
    if config is None:
        return []
    if config.dtype == "float32":
        return ["use --dtype bfloat16 (weights of half the size)"]
    model = config.model
    if not config.has_e4m3 or config.dtype != "bfloat16":
        return []
    if config.quantize_on_load is None and model.quantization is None and model.qtype is None:
        return ["use --quantization fp8 (weights of half the size)"]
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's own error, CUDA's and a library's; and where one lies behind: a capture that it broke off ends
    with an error of its own."""
    for link in _links(error):
        if isinstance(link, torch.OutOfMemoryError):
            return True
        if isinstance(link, RuntimeError) and any(text in str(link) for text in _TEXTS):
            return True
    return False


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error and those that lie behind it, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def lacking_resource(error: BaseException) -> str | None:
    """Of Triton's error for a kernel that no program of this GPU has room for; None for other errors."""
    for link in _links(error):
        found = _RESOURCE.search(str(link))
        if found is not None:
            return f"a kernel needs {found[1]} of {found[2]}, and a program on this GPU has {found[3]}"
    return None


def _smaller(config: EngineConfig | None) -> list[str]:
    """What a user can do about a kernel that does not fit the GPU."""
    is_wide = config is not None and config.dtype == "float32"
    return (["use --dtype bfloat16"] if is_wide else []) + ["try another --attention-backend", "use --device cpu"]


def tried_bytes(error: BaseException) -> int:
    """What the allocation that failed had asked for, as torch words it; 0 where nobody says."""
    for link in _links(error):
        found = _TRIED.search(str(link))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2]])
    return 0


def gib(nbytes: int) -> str:
    """For logs and errors."""
    return f"{nbytes / GIB:.2f} GiB"


def _size_flag(config: EngineConfig | None) -> str:
    if config is not None and config.num_pages is not None:
        return "--max-total-tokens"
    if config is not None and config.kv_memory_bytes is not None:
        return "--kv-cache-memory-gb"
    return "--gpu-memory-utilization"
