"""fp8 checkpoints as they are published: each e4m3 weight and its scale become one tensor, and scales of the KV cache
are set apart.

    X.weight            e4m3 [out, in]
    X.weight_scale      float, [] or [1]: of the tensor; [out] or [out, 1]: of an output channel;
                        [ceil(out / 128), ceil(in / 128)]: of a block
    X.weight_scale_inv  the other name of a block's scale; it is multiplied with as well
    X.input_scale       of static activations; not needed (see quantization/fp8.py)
    ...self_attn.k_scale, ...self_attn.k_proj.k_scale, ...self_attn.attn.k_scale, ...self_attn.k_proj.output_scale:
                        of layer's keys in an 8-bit KV cache, one number; v alike; ...self_attn.kv_scale: of both
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.loader.weight_stream import Span, WeightStream
from tokenspeed.loader.weights import CheckpointWeight, SafetensorsWeight
from tokenspeed.protocol.errors import CheckpointError
from tokenspeed.quantization.fp8_format import BLOCK, E4M3, Fp8Tensor
from tokenspeed.quantization.interface import CPU

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
INPUT_SCALE_NAMES = ("input_scale", "input_activation_scale")

_KV_SCALE = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<both>kv)_scale|(?:(?:attn|[kv]_proj|qkv_proj)\.)?(?P<one>[kv])_scale|(?P<old>[kv])_proj\.output_scale)"
)
_OTHER_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(?:attn\.|q_proj\.)?(?:q_scale|prob_scale|output_scale)")
"""Of 8-bit queries and probabilities: attention computes with wider ones here."""


class Fp8Weight:
    """An e4m3 tensor and its scale. Satisfies `CheckpointWeight` and `Fp8Source`.

    Raises:
        CheckpointError: the scale's shape is not one that the config asks for.
    """

    qtype: str | None = None
    is_raw = False

    def __init__(self, weight: SafetensorsWeight, scale: SafetensorsWeight, config: QuantizationConfig) -> None:
        self.name = weight.name
        self.where = weight.where
        self.shape = weight.shape
        self.nbytes = weight.nbytes + scale.nbytes
        self.unreadable = None if scale.unreadable is None else f"a scale {scale.name} of {scale.unreadable}"
        self._weight = weight
        self._scale = scale
        if len(self.shape) != 2:
            raise CheckpointError(f"{self.where}: e4m3 of shape {list(self.shape)}, expected a matrix")
        rows, columns = self.shape
        allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if config.granularity == "block":
            allowed = [(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))]
        if scale.shape not in allowed:
            shapes = " or ".join(str(list(shape)) for shape in allowed)
            raise CheckpointError(
                f"{scale.where} has shape {list(scale.shape)}, expected {shapes} for a weight {list(self.shape)} "
                f"with a scale a {config.granularity}"
            )
        self._is_block = config.granularity == "block"

    @property
    def span(self) -> Span | None:
        return self._weight.span

    @property
    def stream(self) -> WeightStream | None:
        return self._weight.stream

    @stream.setter
    def stream(self, stream: WeightStream | None) -> None:
        self._weight.stream = stream

    def fp8(self, device: torch.device) -> Fp8Tensor:
        """See `Fp8Source.fp8`.

        Raises:
            CheckpointError: a scale that is not a finite number.
        """
        scale = self._scale.read(torch.float32)
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{self._scale.where} has scales that are not finite")
        if not self._is_block:
            scale = scale.reshape(-1).expand(self.shape[0]).contiguous()
        return Fp8Tensor(self._weight.read(E4M3, device), scale.to(device))

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """See `WeightTensor.read`."""
        return self.fp8(device).dequantize(dtype)

    def raw(self) -> torch.Tensor:
        """Never: e4m3 weights are not GGUF blocks."""
        raise TypeError(f"{self.where} has no block-quantized bytes")


def pair_fp8(weights: list[SafetensorsWeight], config: QuantizationConfig) -> list[CheckpointWeight]:
    """The tensors in their order, e4m3 ones joined with their scales.

    Raises:
        CheckpointError: an e4m3 weight whose scale is missing or has another shape. Names the scale.
    """
    by_name = {weight.name: weight for weight in weights}
    joined: dict[str, CheckpointWeight] = {}
    used: set[str] = set()
    for weight in weights:
        if not weight.is_e4m3:
            continue
        module = weight.name.removesuffix(".weight")
        scale = next((by_name[name] for name in (f"{module}.{end}" for end in SCALE_NAMES) if name in by_name), None)
        if scale is None:
            raise CheckpointError(f"{weight.where} is e4m3, but its scale {module}.{_scale_name(config)} is missing")
        joined[weight.name] = Fp8Weight(weight, scale, config)
        used |= {scale.name, *(f"{module}.{end}" for end in INPUT_SCALE_NAMES)}
    return [joined.get(weight.name, weight) for weight in weights if weight.name not in used]


def _scale_name(config: QuantizationConfig) -> str:
    return "weight_scale_inv" if config.method == "fp8" and config.granularity == "block" else "weight_scale"


def without_kv_scales(weights: Iterable[SafetensorsWeight]) -> list[SafetensorsWeight]:
    """Without the scales of 8-bit attention, which belong to the KV pool and not to the model."""
    return [
        weight for weight in weights if not (_KV_SCALE.fullmatch(weight.name) or _OTHER_SCALE.fullmatch(weight.name))
    ]


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> list[tuple[float, float]]:
    """(k_scale, v_scale) of each layer: an 8-bit pool holds key / k_scale. 1 where the checkpoint has none.

    Raises:
        CheckpointError: a scale that is not one positive number, or of a layer that the model does not have.
    """
    scales = [[1.0, 1.0] for _ in range(num_layers)]
    if checkpoint.format != "safetensors":
        return [(1.0, 1.0)] * num_layers
    for path in checkpoint.weight_files:
        for entry in read_safetensors(path):
            found = _KV_SCALE.fullmatch(entry.name)
            if found is None:
                continue
            weight = SafetensorsWeight(path, entry)
            layer = int(found["layer"])
            if layer >= num_layers:
                raise CheckpointError(f"{weight.where}: the model has {num_layers} layers")
            value = _one_number(weight)
            kind = found["both"] or found["one"] or found["old"]
            for index, letter in enumerate("kv"):
                if letter in kind:
                    scales[layer][index] = value
    return [(k, v) for k, v in scales]


def _one_number(weight: SafetensorsWeight) -> float:
    if weight.unreadable is not None:
        raise CheckpointError(f"{weight.where} has {weight.unreadable}")
    if math.prod(weight.shape) != 1:
        raise CheckpointError(
            f"{weight.where} has shape {list(weight.shape)}, expected one number: a scale a head is not supported; "
            "use --kv-cache-dtype auto with a checkpoint without it"
        )
    value = float(weight.read(torch.float32))
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{weight.where} is {value}, expected a positive number")
    return value
