"""Reads the header of a GGUF file: metadata and the list of tensors. Knows nothing of models, tokenizers or torch.

Layout (little endian; the GGUF specification of ggml, versions 2 and 3):

    "GGUF" | version u32 | num_tensors u64 | num_keys u64
    num_keys    x (key string, type u32, value)            string = u64 length + UTF-8 bytes
    num_tensors x (name string, num_dims u32, dims u64..., type u32, offset u64)
    padding to the alignment | tensor data                 offsets count from here

It parses with `struct` instead of the `gguf` package's reader: that one makes several numpy views for every token of
the vocabulary (1.6 s for 49k tokens, against 0.05 s here) and believes every count in the file. Here each count is
checked against the bytes that are left before anything is allocated, so that a damaged file gives an error, not a hang.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.protocol.errors import CheckpointError

MAX_DIMS = 4
"""ggml's own limit."""

MAX_ARRAY_DEPTH = 4

MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 1 << 24
"""In all arrays of a file together. The largest vocabularies have three arrays of 300k items and a header of 20 MB; a
damaged count inside a file of 100 GB must not become a list of 100 G items."""

DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a GGUF type lies in memory: `block_size` elements of the last axis take `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


_BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}

BLOCK_TYPES: dict[str, BlockType] = {block.name: block for block in _BLOCK_TYPES.values()}

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file.

    Fields:
        name: the file's own spelling (`blk.0.attn_q.weight`).
        shape: logical shape in torch order, [out_features, in_features] for a matrix (GGUF stores it reversed).
        qtype: type name (`F32`, `Q4_1`, ...): a key of BLOCK_TYPES.
        offset: first byte of the data, from the start of the file.
        nbytes: bytes of the data; the range lies within the file.
    """

    name: str
    shape: tuple[int, ...]
    qtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF header. `metadata` values are Python's own: int, float, bool, str and lists of them (token lists too)."""

    path: str
    version: int
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    def map(self) -> mmap.mmap:
        """The whole file, mapped read-only; the operating system reads pages when they are touched."""
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse the header of `path`.

    Raises:
        CheckpointError: not a GGUF file, a version or type that is not known, a header that is damaged or cut off, or
            tensor data that reaches beyond the end of the file. Names the file, the field and what was expected.
    """
    path = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise CheckpointError(f"{path}: {size} bytes is too short for a GGUF file; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).file()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class _Cursor:
    """A position in the header. Every read checks the bytes that are left first."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.items_left = MAX_ARRAY_ITEMS
        self.at = 0
        self.what = "header"

    def file(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it starts with {self.data[:4]!r}, expected b'GGUF')")
        self.at = 4
        version = self.u32()
        if version not in (2, 3):
            hint = (
                "big-endian files are not supported"
                if version & 0xFFFF == 0
                else "convert it again with a current tool"
            )
            raise CheckpointError(f"{self.path}: GGUF version {version}, expected 2 or 3; {hint}")
        num_tensors = self.count("number of tensors", item_bytes=24)
        num_keys = self.count("number of metadata keys", item_bytes=13)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            self.what = f"metadata key {index}"
            key = self.string()
            self.what = f"metadata key {key!r}"
            if key in metadata:
                raise self.damaged("appears twice")
            metadata[key] = self.value(self.u32(), MAX_ARRAY_DEPTH)
        return GGUFFile(self.path, version, metadata, self.tensors(num_tensors, _alignment(self.path, metadata)))

    def tensors(self, num_tensors: int, alignment: int) -> tuple[GGUFTensor, ...]:
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        for index in range(num_tensors):
            self.what = f"tensor {index}"
            name = self.string()
            self.what = f"tensor {name!r}"
            if name in names:
                raise self.damaged("appears twice")
            names.add(name)
            num_dims = self.u32()
            if num_dims > MAX_DIMS:
                raise self.damaged(f"has {num_dims} dimensions, expected at most {MAX_DIMS}")
            shape = tuple(reversed([self.u64() for _ in range(num_dims)]))
            infos.append((name, shape, self.u32(), self.u64()))
        start = -(-self.at // alignment) * alignment
        return tuple(self.tensor(info, start) for info in infos)

    def tensor(self, info: tuple[str, tuple[int, ...], int, int], start: int) -> GGUFTensor:
        name, shape, type_id, offset = info
        self.what = f"tensor {name!r}"
        block = _BLOCK_TYPES.get(type_id)
        if block is None:
            raise CheckpointError(f"{self.path}: {self.what} has the unknown GGUF type number {type_id}")
        columns = shape[-1] if shape else 1
        if columns % block.block_size:
            raise self.damaged(f"of type {block.name} has rows of {columns}, expected a multiple of {block.block_size}")
        num_elements = 1
        for size in shape:
            num_elements *= size
        nbytes = num_elements // block.block_size * block.block_bytes
        begin = start + offset
        if begin + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: {self.what} lies at bytes {begin} to {begin + nbytes}, but the file has only "
                f"{self.size} bytes; it is cut off: download it again"
            )
        return GGUFTensor(name, shape, block.name, begin, nbytes)

    def damaged(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.what} {message}; the file is damaged: download it again")

    def need(self, num_bytes: int) -> None:
        left = self.limit - self.at
        if num_bytes > left:
            raise self.damaged(f"needs {num_bytes} more bytes at offset {self.at}, the header has at most {left} left")

    def u32(self) -> int:
        self.need(4)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        self.need(8)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def count(self, what: str, item_bytes: int) -> int:
        """A u64 count of items that take at least `item_bytes` each in what follows."""
        self.what = what
        value = self.u64()
        self.need(value * item_bytes)
        return value

    def string(self) -> str:
        length = self.u64()
        self.need(length)
        self.at += length
        return _text(self.data[self.at - length : self.at])

    def value(self, type_id: int, depth: int) -> Any:
        scalar = _SCALARS.get(type_id)
        if scalar is not None:
            self.need(scalar.size)
            (value,) = scalar.unpack_from(self.data, self.at)
            self.at += scalar.size
            return value
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise self.damaged(f"has the unknown value type {type_id}")
        return self.array(depth)

    def array(self, depth: int) -> list[Any]:
        if depth == 0:
            raise self.damaged(f"nests arrays deeper than {MAX_ARRAY_DEPTH}")
        self.need(_ARRAY_HEAD.size)
        type_id, length = _ARRAY_HEAD.unpack_from(self.data, self.at)
        self.at += _ARRAY_HEAD.size
        self.items_left -= length
        if self.items_left < 0:
            raise self.damaged(f"has {length} items, expected at most {MAX_ARRAY_ITEMS} in all arrays together")
        scalar = _SCALARS.get(type_id)
        if scalar is not None:
            num_bytes = scalar.size * length
            self.need(num_bytes)
            values = struct.unpack_from(f"<{length}{scalar.format[1:]}", self.data, self.at)
            self.at += num_bytes
            return list(values)
        if type_id == _STRING:
            self.need(8 * length)
            return self.strings(length)
        if type_id != _ARRAY:
            raise self.damaged(f"is an array of the unknown value type {type_id}")
        self.need(_ARRAY_HEAD.size * length)
        return [self.array(depth - 1) for _ in range(length)]

    def strings(self, length: int) -> list[str]:
        """The hot loop of a vocabulary: one length check and one decode a token, no method calls between."""
        data, at, limit, unpack = self.data, self.at, self.limit, _U64.unpack_from
        values: list[str] = []
        for index in range(length):
            begin = at + 8
            at = begin + unpack(data, at)[0] if begin <= limit else limit + 1
            if at > limit:
                raise self.damaged(f"is cut off at item {index} of {length}")
            values.append(_text(data[begin:at]))
        self.at = at
        return values


def _text(raw: bytes) -> str:
    """UTF-8; broken bytes become distinct printable escapes, so that two broken tokens do not become one."""
    return raw.decode("utf-8", "backslashreplace")


def _alignment(path: str, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    return alignment
