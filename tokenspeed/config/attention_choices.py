"""The names that `--attention-backend` takes: those of the public contract, and `paged`, our own on a CPU.

Names only, so that command line and documentation need no torch; whether a backend can serve a model is for
`attention.select` to say.
"""

from __future__ import annotations

from typing import Literal

from tokenspeed.config.backend_names import AUTO, BackendNames
from tokenspeed.config.engine import Choice

MHA = "mha"
CPU_BACKENDS = ("paged",)
GPU_BACKENDS = ("triton", "fa3", "fa4", "flashinfer")
"""`triton` is our own; the others are adapters to packages that may be installed."""

_NO_MLA = "multi-head latent attention models are not served yet"
_NO_TRTLLM = "its kernels are for NVIDIA Blackwell GPUs, and there is no adapter for them yet"
WITHOUT_IMPLEMENTATION = {
    "mla": _NO_MLA,
    "trtllm": _NO_TRTLLM,
    "trtllm_mha": _NO_TRTLLM,
    "trtllm_mla": _NO_MLA,
    "flashmla": _NO_MLA,
    "tokenspeed_mla": _NO_MLA,
    "hybrid_linear_attn": "hybrid linear-attention models are not served yet",
}
"""Names of the public contract that have no implementation here: name -> reason."""

NAMES = BackendNames(
    "--attention-backend", "attention", "this model", {"cpu": CPU_BACKENDS, "cuda": GPU_BACKENDS},
    WITHOUT_IMPLEMENTATION, aliases=(MHA,),
)  # fmt: skip


def settle(choice: str, device: Literal["cpu", "cuda"], choices: list[Choice]) -> str:
    """The backend to look for: a name of `CPU_BACKENDS` or `GPU_BACKENDS`, or `auto`, which `mha` stands for too.

    Raises:
        ConfigError: see `BackendNames.check`.
    """
    NAMES.check(choice, device)
    if choice != MHA:
        return choice
    reason = f"{MHA} names no kernels, but models with ordinary heads, and every model that is served has these"
    choices.append(Choice("--attention-backend", AUTO, reason))
    return AUTO
