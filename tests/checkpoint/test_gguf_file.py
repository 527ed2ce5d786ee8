"""The GGUF header reader agrees with the `gguf` package and survives any damage with a CheckpointError."""

import random
import struct

import gguf
import numpy as np
import pytest

from tokenspeed.checkpoint import gguf_file
from tokenspeed.checkpoint.gguf_file import BLOCK_TYPES, read_gguf
from tokenspeed.protocol.errors import CheckpointError


@pytest.fixture
def tiny(tmp_path):
    """A file with every kind of value and three tensors, Q8_0, F16 and F32."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int64("i64", -5)
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße 🙂")
    writer.add_array("tokens", ["a", "Ġb", "🙂", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    rows = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor(
        "q8", gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("half", rows.astype(np.float16))
    writer.add_tensor("vector", rows[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def test_agrees_with_the_gguf_package(tiny):
    ours, theirs = read_gguf(tiny), gguf.GGUFReader(tiny)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.metadata["tokens"] == ["a", "Ġb", "🙂", ""]
    assert [(t.name, t.shape, t.qtype, t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]
    assert [t.shape for t in ours.tensors] == [(4, 64), (4, 64), (64,)]


def test_the_map_holds_the_tensor_bytes(tiny):
    file = read_gguf(tiny)
    vector = file.tensors[2]
    with file.map() as data:
        values = np.frombuffer(data[vector.offset : vector.offset + vector.nbytes], np.float32)
    np.testing.assert_array_equal(values, np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)[0])


def test_block_types_agree_with_the_gguf_package():
    for name, block in BLOCK_TYPES.items():
        if name in gguf.GGMLQuantizationType.__members__:
            sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
            assert (block.block_size, block.block_bytes) == sizes, name
            assert gguf_file._BLOCK_TYPES[gguf.GGMLQuantizationType[name].value] == block


def test_default_model_has_its_vocabulary(default_checkpoint):
    file = read_gguf(default_checkpoint.config_path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.tensors) == 272


def test_truncation_is_an_error(tiny, tmp_path):
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    # Every byte of the first keys, then steps that fall on every kind of field.
    for length in [*range(120), *range(120, len(whole), 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_random_damage_never_crashes(tiny, tmp_path):
    """Any outcome but a CheckpointError or a GGUFFile fails: MemoryError, struct.error, UnicodeDecodeError, a hang."""
    whole = bytearray(tiny.read_bytes())
    rng = random.Random(7)
    damaged = tmp_path / "damaged.gguf"
    errors = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(4, 1100)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        damaged.write_bytes(data)
        try:
            read_gguf(damaged)
        except CheckpointError as error:
            errors += 1
            assert "damaged.gguf" in str(error)
    assert errors > 80


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes is too short"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(version=1), "version 1, expected 2 or 3"),
        (header(version=3 << 24), "big-endian"),
        (header(num_tensors=1 << 62), "number of tensors needs"),
        (header(num_keys=1 << 63), "number of metadata keys needs"),
        (header(num_keys=1) + struct.pack("<Q", 1 << 60) + bytes(20), "metadata key 0 needs"),
        (header(num_keys=1) + string("k") + struct.pack("<I", 99), "unknown value type 99"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 60), "'k' has 1152921504606846976 items"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 20), "'k' needs 4194304 more bytes"),
        (header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") * 1 + bytes(7), "needs|cut off"),
        (header(num_keys=1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 8, "deeper than 4"),
        (header(num_keys=2) + (string("k") + struct.pack("<IB", 0, 1)) * 2, "'k' appears twice"),
        (header(num_tensors=1) + string("t") + struct.pack("<I", 5) + bytes(80), "5 dimensions, expected at most 4"),
        (header(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 32, 77, 0), "unknown GGUF type number 77"),
        (
            header(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 33, 2, 0),
            "rows of 33, expected a multiple of 32",
        ),
        (header(num_tensors=1) + string("t") + struct.pack("<IQQIQ", 2, 1 << 60, 1 << 60, 0, 0), "it is cut off"),
        (
            header(num_keys=1) + string("general.alignment") + struct.pack("<II", 4, 7),
            "general.alignment is 7, expected a power of two",
        ),
    ],
)
def test_errors_name_what_is_wrong(tmp_path, data, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_huge_array_inside_a_huge_file_is_refused(tmp_path):
    """A count that the file could hold must not become a list of it: the file is sparse, 8 GiB long."""
    path = tmp_path / "sparse.gguf"
    with open(path, "wb") as file:
        file.write(header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 0, 7 << 30))
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match="in all arrays together"):
        read_gguf(path)


def test_huge_string_inside_a_huge_file_is_refused(tmp_path):
    path = tmp_path / "sparse.gguf"
    with open(path, "wb") as file:
        file.write(header(num_keys=1) + string("k") + struct.pack("<IQ", 8, 7 << 30))
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match="needs 7516192768 more bytes"):
        read_gguf(path)


def test_broken_utf8_tokens_stay_distinct(tmp_path):
    path = tmp_path / "broken.gguf"
    items = b"".join(struct.pack("<Q", 1) + bytes([byte]) for byte in (0xFE, 0xFF))
    path.write_bytes(header(num_keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 2) + items)
    assert read_gguf(path).metadata["k"] == ["\\xfe", "\\xff"]


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")
