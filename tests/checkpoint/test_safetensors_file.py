"""The safetensors header reader agrees with the `safetensors` package and turns damage into CheckpointError."""

import json
import random
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenspeed.checkpoint.safetensors_file import read_safetensors
from tokenspeed.protocol.errors import CheckpointError


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.safetensors"
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, np.float16),
        "c": np.zeros((), np.int64),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def with_header(path, header, data: bytes = bytes(64)):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def test_entries(tiny):
    entries = {entry.name: entry for entry in read_safetensors(tiny)}
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (4,)),
        "c": ("I64", ()),
    }
    entry = entries["a"]
    raw = tiny.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32), np.arange(6))


def test_truncation_at_every_byte_is_an_error(tiny, tmp_path):
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_safetensors(cut)


def test_random_damage_never_crashes(tiny, tmp_path):
    whole = tiny.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(3)
    damaged = tmp_path / "damaged.safetensors"
    errors = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 2, 6))):
            data[rng.randrange(header_end)] = rng.randrange(256)
        damaged.write_bytes(data)
        try:
            read_safetensors(damaged)
        except CheckpointError:
            errors += 1
    assert errors > 100


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "the header is not JSON"),
        (b"[" * 100_000, "the header is not JSON"),
        ([], "not a JSON object"),
        ({"t": 5}, "'t': damaged header entry"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "'t': damaged header entry.*data_offsets"),
        ({"t": {"dtype": "F13", "shape": [2], "data_offsets": [0, 8]}}, "'t' has type 'F13', which is not known"),
        ({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, r"'t' has the shape \[-2\]"),
        ({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "needs 12 bytes, the header gives 8"),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "needs 8 bytes, the header gives 8"),
        ({"t": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, "the file has only .* cut off"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, header, message):
    path = with_header(tmp_path / "bad.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


def test_header_length_is_bounded(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + bytes(100))
    with pytest.raises(CheckpointError, match="claims 4611686018427387904 bytes"):
        read_safetensors(path)
