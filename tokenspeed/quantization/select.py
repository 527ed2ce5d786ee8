"""Which scheme stores a model's weights here, and why."""

from __future__ import annotations

from typing import Literal

from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.ops import Ops
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.quantization.fp8 import Fp8
from tokenspeed.quantization.gguf import GGUF
from tokenspeed.quantization.interface import Scheme
from tokenspeed.quantization.unquantized import Unquantized

GGUF_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
"""Types that the GGUF loader reads; a config's `qtype` outside of them names a method that nothing here implements."""


def scheme_for(config: ModelConfig, ops: Ops, quantize: Literal["fp8"] | None = None) -> Scheme:
    """The scheme for a model; `scheme.reason` says why.

    Args:
        quantize: quantize a checkpoint that is not, while it loads.

    Raises:
        ConfigError: the checkpoint's quantization method is not one that this version reads.
    """
    dtype = str(ops.dtype).removeprefix("torch.")
    if config.quantization is not None and config.quantization.method == "mxfp4":
        reason = f"experts stay in E2M1 with a scale for 32 values, as the checkpoint has them; all else is {dtype}"
        return Unquantized(ops, reason, "mxfp4")
    if config.quantization is not None or quantize is not None:
        return Fp8(ops, config.quantization)
    if config.qtype is None:
        return Unquantized(ops, f"the checkpoint is not quantized; weights are kept in {dtype}")
    if config.qtype not in GGUF_TYPES:
        raise ConfigError(
            f"the checkpoint is quantized with {config.qtype!r}, which this version does not read; use an unquantized "
            f"checkpoint or a GGUF file of one of: {', '.join(sorted(GGUF_TYPES))}"
        )
    if ops.block_linear is None:
        return Unquantized(
            ops, f"no kernel keeps {config.qtype} blocks on {ops.device} in {dtype}; weights are dequantized to {dtype}"
        )
    return GGUF(
        ops,
        ops.block_linear,
        f"blocks of {', '.join(sorted(ops.block_linear.qtypes))} stay quantized for up to {ops.block_linear.max_rows} "
        f"rows; more rows, and other types, use {dtype}",
    )
