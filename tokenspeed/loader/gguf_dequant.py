"""GGUF block types to dense numbers, vectorised over blocks. Knows bytes and formulas, nothing of files or models.

Formulas and layouts: ggml's `ggml-quants.h`, restated at each function. N blocks come as uint8 [N, block_bytes] and
leave as float32 [N, block_size]; d, m and dmin are float16 in the file, arithmetic is float32, so results equal those
of the `gguf` package bit for bit. Work goes in pieces of about a megabyte, so that temporaries stay in a core's cache
and a large tensor is held once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed.checkpoint.gguf_file import BLOCK_TYPES
from tokenspeed.protocol.errors import CheckpointError

PIECE_ELEMENTS = 1 << 18
DEVICE_PIECE_ELEMENTS = 1 << 25
"""On a GPU launches cost, not caches: a piece makes some 0.5 GB of temporaries."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: torch.Tensor, qtype: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """raw uint8 [rows, row_bytes] -> a new tensor [rows, elements a row] in `dtype` (rounded once, from float32).

    Computed on the device of `raw`.

    Raises:
        CheckpointError: a type that cannot be dequantized; names it and what can.
    """
    if qtype not in SUPPORTED:
        raise CheckpointError(f"GGUF type {qtype} is not supported; supported are {', '.join(sorted(SUPPORTED))}")
    block = BLOCK_TYPES[qtype]
    rows, row_bytes = raw.shape
    columns = row_bytes // block.block_bytes * block.block_size
    if qtype in _PLAIN:
        return raw.contiguous().view(_PLAIN[qtype]).to(dtype, copy=True)
    blocks = raw.reshape(-1, block.block_bytes)
    out = torch.empty((blocks.shape[0], block.block_size), dtype=dtype, device=raw.device)
    formula = _FORMULAS[qtype]
    step = (PIECE_ELEMENTS if raw.device.type == "cpu" else DEVICE_PIECE_ELEMENTS) // block.block_size
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = formula(blocks[start : start + step])
    return out.view(rows, columns)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: torch.Tensor, groups: int, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Bit fields of bytes [N, B]: in each of `groups` equal runs of bytes, all fields at the first shift come first.

    Returns uint8 [N, B * len(shifts)].
    """
    runs = packed.reshape(packed.shape[0], groups, 1, -1)
    return torch.cat([(runs >> shift) & mask for shift in shifts], dim=2).view(packed.shape[0], -1)


_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = (0, 1, 2, 3, 4, 5, 6, 7)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d | 16 bytes: low nibbles are elements 0..15, high 16..31.  y = d (q - 8)"""
    return (_fields(blocks[:, 2:18], 1, _NIBBLES, 15).float() - 8) * _halves(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """d m | 16 bytes as Q4_0.  y = d q + m"""
    return _fields(blocks[:, 4:20], 1, _NIBBLES, 15).float() * _halves(blocks, 0) + _halves(blocks, 2)


def _fifth_bits(high: torch.Tensor) -> torch.Tensor:
    """4 bytes, bit i of the little-endian word belongs to element i -> uint8 [N, 32], shifted to bit 4."""
    return _fields(high, 4, _BITS, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """d | 4 bytes of fifth bits | 16 bytes as Q4_0.  y = d (q - 16)"""
    q = _fields(blocks[:, 6:22], 1, _NIBBLES, 15) | _fifth_bits(blocks[:, 2:6])
    return (q.float() - 16) * _halves(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """d m | 4 bytes of fifth bits | 16 bytes as Q4_0.  y = d q + m"""
    q = _fields(blocks[:, 8:24], 1, _NIBBLES, 15) | _fifth_bits(blocks[:, 4:8])
    return q.float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d | 32 signed bytes.  y = d q"""
    return blocks[:, 2:34].view(torch.int8).float() * _halves(blocks, 0)


def _scaled(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q [N, 256] times one scale for each of the equal runs of elements: scales [N, runs] -> [N, 256]."""
    return (q.view(q.shape[0], scales.shape[1], -1) * scales[:, :, None]).view(q.shape)


def _scaled_less(q: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """scale q - minimum, run by run as in `_scaled`."""
    runs = q.view(q.shape[0], scales.shape[1], -1)
    return (runs * scales[:, :, None] - minima[:, :, None]).view(q.shape)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 bytes (4-bit scale, 4-bit minimum) for runs of 16 | 64 bytes of 2-bit q | d dmin.  y = d s q - dmin m"""
    q = _fields(blocks[:, 16:80], 2, _PAIRS, 3).float()
    scales, minima = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    return _scaled_less(q, scales * _halves(blocks, 80), minima * _halves(blocks, 82))


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits | 64 bytes of 2-bit q | 12 bytes of 6-bit scales for runs of 16 | d.

    y = d (s - 32) (q - 4 (1 - third bit)). Scale i: low 4 bits in nibbles of the first 8 bytes, high 2 in the last 4.
    """
    third = _fields(blocks[:, :32], 1, _BITS, 1)
    q = (_fields(blocks[:, 32:96], 2, _PAIRS, 3) | (third << 2)).float() - 4
    low = _fields(blocks[:, 96:104], 1, _NIBBLES, 15)
    high = _fields(blocks[:, 104:108], 1, _PAIRS, 3)
    scales = (low | (high << 4)).float() - 32
    return _scaled(q, scales * _halves(blocks, 108))


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits, float32 [N, 8] each.

    Scales 0..3 lie in the low 6 bits of bytes 0..3, minima 0..3 in those of bytes 4..7. Scales and minima 4..7: low
    4 bits in the low and high nibbles of bytes 8..11, high 2 bits in the top of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """d dmin | 12 bytes of 6-bit scales and minima for runs of 32 | 128 bytes of 4-bit q.  y = d s q - dmin m"""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    q = _fields(blocks[:, 16:144], 4, _NIBBLES, 15).float()
    return _scaled_less(q, scales * _halves(blocks, 0), minima * _halves(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """d dmin | 12 bytes as Q4_K | 32 bytes of fifth bits | 128 bytes of 4-bit q.  y = d s q - dmin m"""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    fifth = _fields(blocks[:, 16:48], 1, _BITS, 1) << 4
    q = (_fields(blocks[:, 48:176], 4, _NIBBLES, 15) | fifth).float()
    return _scaled_less(q, scales * _halves(blocks, 0), minima * _halves(blocks, 2))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of low nibbles | 64 bytes of high pairs | 16 signed scales for runs of 16 | d.  y = d s (q - 32)"""
    low = _fields(blocks[:, :128], 2, _NIBBLES, 15)
    high = _fields(blocks[:, 128:192], 2, _PAIRS, 3) << 4
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _scaled((low | high).float() - 32, scales * _halves(blocks, 208))


_FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

SUPPORTED = frozenset(_FORMULAS) | frozenset(_PLAIN)
