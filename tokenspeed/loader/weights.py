"""Tensors of a checkpoint that have not been read yet: from safetensors, from GGUF, or made up.

Each satisfies `quantization.interface.WeightTensor`.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch

from tokenspeed.checkpoint.gguf_file import BLOCK_TYPES, GGUFTensor
from tokenspeed.checkpoint.safetensors_file import SafetensorsEntry
from tokenspeed.loader.file_bytes import read_bytes
from tokenspeed.loader.gguf_dequant import SUPPORTED, dequantize
from tokenspeed.loader.gguf_names import hf_name
from tokenspeed.loader.weight_stream import Span, WeightStream
from tokenspeed.quantization.interface import CPU, WeightTensor

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_E4M3 = "F8_E4M3"
_BYTES = "U8"

DUMMY_STD = 0.02
DUMMY_BLOCK_ELEMENTS = 1048573
"""A prime, so that no two rows of a matrix are alike."""


class CheckpointWeight(WeightTensor, Protocol):
    """What the loader wants to know in addition, before it reads.

    Fields:
        nbytes: bytes that reading takes from the file; for the progress bar.
        unreadable: why this tensor's type cannot be used, or None.
        is_raw: it holds bytes (uint8), which `read` gives as they are; else numbers.
        span: where its bytes lie, or None when it has no file.
        stream: brings the bytes to a device other than the CPU; set by the loader.
    """

    nbytes: int
    unreadable: str | None
    is_raw: bool
    stream: WeightStream | None

    @property
    def span(self) -> Span | None: ...


class SafetensorsWeight:
    """A tensor of a safetensors file. e4m3 without its scale is unreadable; `fp8_weights` joins the two."""

    qtype: str | None = None
    stream: WeightStream | None = None

    def __init__(self, path: str, entry: SafetensorsEntry) -> None:
        self.name = entry.name
        self.where = f"{path}: tensor {entry.name!r}"
        self.shape = entry.shape
        self.nbytes = entry.nbytes
        self.unreadable: str | None = None
        self.is_raw = entry.dtype == _BYTES
        if entry.dtype not in _SAFETENSORS_DTYPES and not self.is_raw:
            self.unreadable = f"type {entry.dtype}, expected one of {', '.join(_SAFETENSORS_DTYPES)}"
        self.span = Span(path, entry.offset, entry.nbytes, self.where)
        self.is_e4m3 = entry.dtype == _E4M3
        self._dtype = entry.dtype

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """See `WeightTensor.read`. Converted on the device."""
        raw = _bytes(self.span, self.stream, device)
        if self.is_raw:
            assert dtype == torch.uint8, "bytes are not numbers"
            return raw.view(self.shape)
        stored = torch.float8_e4m3fn if self.is_e4m3 else _SAFETENSORS_DTYPES[self._dtype]
        return raw.view(stored).view(self.shape).to(dtype)

    def raw(self) -> torch.Tensor:
        """Never: safetensors weights are not block-quantized here."""
        raise TypeError(f"{self.where} has no block-quantized bytes")


class GGUFWeight:
    """A tensor of a GGUF file.

    Args:
        row_order: for permuted tensors, int64 [shape[0]]: HF row i is the file's row row_order[i]. Whole rows move, so
            it applies to quantized bytes as well.
    """

    is_raw = False
    stream: WeightStream | None = None

    def __init__(self, path: str, tensor: GGUFTensor, row_order: torch.Tensor | None) -> None:
        self.name = hf_name(tensor.name)
        self.where = f"{path}: tensor {tensor.name!r}"
        self.shape = tensor.shape
        self.nbytes = tensor.nbytes
        self.qtype = tensor.qtype if BLOCK_TYPES[tensor.qtype].block_size > 1 else None
        self.unreadable: str | None = None
        if tensor.qtype not in SUPPORTED:
            self.unreadable = f"GGUF type {tensor.qtype}, supported are {', '.join(sorted(SUPPORTED))}"
        self.span = Span(path, tensor.offset, tensor.nbytes, self.where)
        self._qtype = tensor.qtype
        self._row_order = row_order

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """See `WeightTensor.read`. Dequantized on the device."""
        return dequantize(self._rows(device), self._qtype, dtype).view(self.shape)

    def raw(self) -> torch.Tensor:
        """See `WeightTensor.raw`."""
        if self.qtype is None or len(self.shape) != 2:
            raise TypeError(f"{self.where} is {self._qtype} of shape {self.shape}, not a block-quantized matrix")
        return self._rows(CPU)

    def _rows(self, device: torch.device) -> torch.Tensor:
        """uint8 [rows, row_bytes] in HF order; one row for a vector, but one an element where its rows move."""
        flat = _bytes(self.span, self.stream, device)
        if self._row_order is not None:
            return flat.view(self.shape[0], -1).index_select(0, self._row_order.to(device))
        return flat.view(math.prod(self.shape[:-1]), -1)


def llama_row_order(num_heads: int, head_dim: int) -> torch.Tensor:
    """Undoes the converter's reordering: row h D + s D/2 + j of HF is row h D + 2 j + s of the file (s is 0 or 1).

    Returns:
        int64 [num_heads * head_dim], for `GGUFWeight.row_order`.
    """
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


class DummyWeight:
    """Random numbers in place of a file: normal with std 0.02, ones for norms. Seed, name and kind of device decide
    the values."""

    qtype: str | None = None
    unreadable: str | None = None
    is_raw = False
    span: Span | None = None
    stream: WeightStream | None = None

    def __init__(self, name: str, shape: tuple[int, ...], seed: int) -> None:
        self.name = name
        self.where = f"dummy weights: tensor {name!r}"
        self.shape = shape
        self.nbytes = math.prod(shape) * 4
        self._seed = seed

    def read(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """See `WeightTensor.read`. Made on the device; on a CPU a block of values is repeated, which takes a tenth of
        the time and leaves every row different."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        if len(self.shape) == 1 and self.name.endswith("norm.weight"):
            return out.fill_(1.0)
        generator = self._generator(device)
        if device.type != "cpu":
            return out.normal_(0.0, DUMMY_STD, generator=generator)
        flat = out.view(-1)
        block = torch.empty(min(flat.shape[0], DUMMY_BLOCK_ELEMENTS)).normal_(0.0, DUMMY_STD, generator=generator)
        rounded = block.to(dtype)
        for start in range(0, flat.shape[0], DUMMY_BLOCK_ELEMENTS):
            piece = flat[start : start + DUMMY_BLOCK_ELEMENTS]
            piece.copy_(rounded[: piece.shape[0]])
        return out

    def _generator(self, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{self.name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def raw(self) -> torch.Tensor:
        """Never: dummy weights are not block-quantized."""
        raise TypeError(f"{self.where} has no block-quantized bytes")


def _bytes(span: Span, stream: WeightStream | None, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the device."""
    if device.type == "cpu" or stream is None:
        return read_bytes(span.path, span.offset, span.nbytes, span.where).to(device)
    return stream.take(span, device)
