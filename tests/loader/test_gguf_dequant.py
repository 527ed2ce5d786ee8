"""Dequantization equals the `gguf` package's, bit for bit, for every type that both know."""

import gguf
import numpy as np
import pytest
import torch

from tokenspeed.checkpoint.gguf_file import BLOCK_TYPES
from tokenspeed.loader.gguf_dequant import PIECE_ELEMENTS, SUPPORTED, dequantize
from tokenspeed.protocol.errors import CheckpointError

HALF_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
BLOCKS = sorted(SUPPORTED - {"F32", "F16", "BF16"})


def random_rows(qtype: str, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """Every byte random, except the float16 fields, which are random finite numbers."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * blocks_per_row, BLOCK_TYPES[qtype].block_bytes), dtype=np.uint8)
    for at in HALF_OFFSETS[qtype]:
        blocks[:, at : at + 2] = rng.normal(0, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def reference(raw: np.ndarray, qtype: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype])


def test_every_supported_type_is_covered():
    assert set(BLOCKS) == set(HALF_OFFSETS)
    wanted = {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F32", "F16", "BF16"}
    assert wanted == SUPPORTED


@pytest.mark.parametrize("qtype", BLOCKS)
def test_random_blocks_are_bit_exact(qtype):
    raw = random_rows(qtype, rows=7, blocks_per_row=5)
    out = dequantize(torch.from_numpy(raw), qtype)
    assert out.shape == (7, 5 * BLOCK_TYPES[qtype].block_size)
    expected = reference(raw, qtype)
    # Compared as integers: -0.0 and 0.0 are different here.
    np.testing.assert_array_equal(out.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("qtype", BLOCKS)
def test_piece_borders(qtype):
    """More blocks than one piece, and a last piece that is not full."""
    size = BLOCK_TYPES[qtype].block_size
    raw = random_rows(qtype, rows=PIECE_ELEMENTS // size + 3, blocks_per_row=1)
    np.testing.assert_array_equal(dequantize(torch.from_numpy(raw), qtype).numpy(), reference(raw, qtype))


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16"])
def test_plain_types(qtype):
    values = torch.randn(3, 8).to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[qtype])
    out = dequantize(values.view(torch.uint8), qtype)
    assert torch.equal(out, values.float())
    assert out.data_ptr() != values.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_rounded_once_from_float32(dtype):
    raw = torch.from_numpy(random_rows("Q4_1", rows=4, blocks_per_row=3))
    assert torch.equal(dequantize(raw, "Q4_1", dtype), dequantize(raw, "Q4_1").to(dtype))


def test_rows_that_are_not_contiguous():
    raw = torch.from_numpy(random_rows("Q6_K", rows=6, blocks_per_row=2))
    assert torch.equal(dequantize(raw[::2], "Q6_K"), dequantize(raw, "Q6_K")[::2])


@pytest.mark.parametrize("qtype", sorted(set(BLOCK_TYPES) - SUPPORTED))
def test_other_types_are_refused_by_name(qtype):
    with pytest.raises(CheckpointError, match=f"{qtype} is not supported.*Q4_K"):
        dequantize(torch.zeros(1, BLOCK_TYPES[qtype].block_bytes, dtype=torch.uint8), qtype)
