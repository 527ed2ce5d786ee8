"""The names that `--moe-backend` takes: those of the public contract, and `torch`, our own on a CPU.

Names only, so that command line and documentation need no torch; whether a backend can serve a model is for
`moe.select` to say.
"""

from __future__ import annotations

from typing import Literal

from tokenspeed.config.backend_names import AUTO, BackendNames
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.protocol.errors import ConfigError

CPU_BACKENDS = ("torch",)
GPU_BACKENDS = ("triton",)

_NO_GLUON = "its kernels are for AMD gfx950 GPUs, which are not supported yet"
_NO_ADAPTER = "there is no adapter to its kernels yet"
_NO_BLACKWELL = "its kernels are for NVIDIA Blackwell GPUs, and there is no adapter to them yet"
WITHOUT_IMPLEMENTATION = {
    "gluon": _NO_GLUON,
    "gluon_petit": f"{_NO_GLUON}; there it takes at most 1024 tokens a GPU",
    "marlin": "there is no adapter to its kernels, which have no biases and so cannot serve GPT-OSS",
    "flashinfer_trtllm": _NO_BLACKWELL,
    "flashinfer_cutlass": _NO_ADAPTER,
    "flashinfer_cutedsl": _NO_BLACKWELL,
    "deep_gemm": _NO_ADAPTER,
    "mega_moe": "it belongs to DeepSeek V4, which is not served yet",
}
"""Names of the public contract that have no implementation here: name -> reason."""

NAMES = BackendNames(
    "--moe-backend", "MoE", "the experts of this model", {"cpu": CPU_BACKENDS, "cuda": GPU_BACKENDS},
    WITHOUT_IMPLEMENTATION,
)  # fmt: skip


def check_dtype(dtype: str, has_experts: bool, stored: QuantizationConfig | None, quantize_on_load: str | None) -> None:
    """Before `check`, whose advice names backends.

    Args:
        stored: how the checkpoint's weights are quantized.
    Raises:
        ConfigError: float16 with experts that are kept in fewer bits: no backend computes them in it.
    """
    if dtype != "float16" or not has_experts:
        return
    kept = None
    if stored is not None and stored.method == "mxfp4":
        kept = "MXFP4"
    elif quantize_on_load == "fp8" or (stored is not None and stored.granularity == "block"):
        kept = "e4m3 with a scale a block"
    if kept is not None:
        raise ConfigError(
            f"--dtype is float16, and this model's experts are kept in {kept}, which no MoE backend computes in "
            "float16; use --dtype bfloat16"
        )


def check(choice: str, device: Literal["cpu", "cuda"], has_experts: bool) -> None:
    """
    Raises:
        ConfigError: see `BackendNames.check`; or the model has no layer that the choice is about.
    """
    NAMES.check(choice, device)
    if choice != AUTO and not has_experts:
        raise ConfigError(f"--moe-backend is {choice}, but this model has no expert layers; leave the flag out")
