"""The names that `--attention-backend` takes: those of the public contract, and `paged`, our own on a CPU.

Names only, so that command line and documentation need no torch; whether a backend can serve a model is for
`attention.select` to say.
"""

from __future__ import annotations

from typing import Literal

from tokenspeed.protocol.errors import ConfigError

AUTO = "auto"
CPU_BACKENDS = ("paged",)
GPU_BACKENDS = ("triton", "fa3", "fa4", "flashinfer")
"""`triton` is our own; the others are adapters to packages that may be installed."""

_NO_MLA = "multi-head latent attention models are not served yet"
_NO_TRTLLM = "its kernels are for NVIDIA Blackwell GPUs, and there is no adapter for them yet"
WITHOUT_IMPLEMENTATION = {
    "mha": "it names no kernels here; triton serves models with ordinary heads",
    "mla": _NO_MLA,
    "trtllm": _NO_TRTLLM,
    "trtllm_mha": _NO_TRTLLM,
    "trtllm_mla": _NO_MLA,
    "flashmla": _NO_MLA,
    "tokenspeed_mla": _NO_MLA,
    "hybrid_linear_attn": "hybrid linear-attention models are not served yet",
}
"""Names of the public contract that have no implementation here: name -> reason."""


def check_device(choice: str, device: Literal["cpu", "cuda"]) -> None:
    """
    Raises:
        ConfigError: the backend is for another kind of device. Names those for this one.
    """
    here, where = (CPU_BACKENDS, "a CPU") if device == "cpu" else (GPU_BACKENDS, "a GPU")
    if choice != AUTO and choice not in here:
        raise ConfigError(
            f"--attention-backend {choice} does not run on {where}; use one of: {', '.join((AUTO, *here))}"
        )
