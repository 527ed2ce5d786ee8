"""Loading: what arrives at the model, and that every mismatch is found before a byte of a weight is read."""

import re
from dataclasses import dataclass, field

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.loader import weights
from tokenspeed.loader.load import load_model, open_weights
from tokenspeed.protocol.errors import CheckpointError

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=40,
    max_position=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)
Q, K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
SHAPES = {"model.embed_tokens.weight": (40, 64), Q: (64, 64), K: (32, 64), V: (32, 64), "model.norm.weight": (64,)}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    Q: "blk.0.attn_q.weight",
    K: "blk.0.attn_k.weight",
    V: "blk.0.attn_v.weight",
    "model.norm.weight": "output_norm.weight",
}


@dataclass
class FakeModel:
    """Keeps what it is given; the loader's part of `Model`."""

    shapes: dict = field(default_factory=lambda: dict(SHAPES))
    dtype: torch.dtype = torch.float32
    loaded: dict = field(default_factory=dict)
    raw: dict = field(default_factory=dict)
    finished: int = 0

    def load_rules(self):
        return {name: self._take for name in self.shapes}

    def expected_shapes(self):
        return self.shapes

    def raw_names(self):
        return frozenset()

    def ignorable(self, name):
        return name.endswith(".rotary_emb.inv_freq")

    def finish(self):
        self.finished += 1

    def _take(self, weight):
        assert weight.name not in self.loaded
        self.loaded[weight.name] = weight.read(self.dtype)
        if weight.qtype is not None:
            self.raw[weight.name] = weight.raw()


def tensors(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def checkpoint(*files, file_format="safetensors") -> Checkpoint:
    return Checkpoint(
        name="x",
        format=file_format,
        config_path=str(files[0]),
        weight_files=tuple(str(file) for file in files),
        tokenizer_path="",
    )


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What the llama converter does to q and k."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_gguf(path, values, qtype="F32", permute=True, names=GGUF_NAMES):
    kind = gguf.GGMLQuantizationType[qtype]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        rows = value.numpy()
        if permute and name in (Q, K):
            rows = permuted(rows, 4 if name == Q else 2)
        if rows.ndim == 1:
            writer.add_tensor(names.get(name, name), rows)
        else:
            writer.add_tensor(names.get(name, name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_safetensors(tmp_path, stored, wanted):
    values = tensors(stored)
    save_file(values, tmp_path / "model.safetensors")
    model = FakeModel(dtype=wanted)
    load_model(model, checkpoint(tmp_path / "model.safetensors"), CONFIG)
    assert_equal(model.loaded, {name: value.to(wanted) for name, value in values.items()})
    assert model.finished == 1
    assert model.raw == {}


def test_shards(tmp_path):
    values = tensors()
    names = list(values)
    save_file({name: values[name] for name in names[:2]}, tmp_path / "a.safetensors")
    save_file({name: values[name] for name in names[2:]}, tmp_path / "b.safetensors")
    model = FakeModel()
    load_model(model, checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors"), CONFIG)
    assert_equal(model.loaded, values)


def test_each_read_is_a_new_tensor(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    [weight, *_] = open_weights(checkpoint(tmp_path / "model.safetensors"), CONFIG, FakeModel())
    first = weight.read(torch.float32)
    second = weight.read(torch.float32)
    first.zero_()
    assert second.abs().sum() > 0


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_rows_of_q_and_k_come_in_hf_order(tmp_path, qtype):
    """Quantization works along rows, so quantizing then moving rows equals moving then quantizing: compared exactly."""
    values = tensors()
    path = write_gguf(tmp_path / "m.gguf", values, qtype)
    model = FakeModel()
    load_model(model, checkpoint(path, file_format="gguf"), CONFIG)
    kind = gguf.GGMLQuantizationType[qtype]
    for name, value in values.items():
        expected = value
        if value.ndim == 2:
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind))
        assert torch.equal(model.loaded[name], expected), name
    if qtype.startswith("Q"):
        assert model.raw.keys() == {name for name, shape in SHAPES.items() if len(shape) == 2}
        for name, raw in model.raw.items():
            assert torch.equal(raw, torch.from_numpy(gguf.quants.quantize(values[name].numpy(), kind))), name
    else:
        assert model.raw == {}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_gguf_qwen_rows_are_not_moved(tmp_path, architecture):
    values = tensors()
    path = write_gguf(tmp_path / "m.gguf", values, permute=False)
    model = FakeModel()
    config = ModelConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | {"architecture": architecture}
    )
    load_model(model, checkpoint(path, file_format="gguf"), config)
    assert_equal(model.loaded, values)


def test_gguf_biases_are_moved_too(tmp_path):
    bias = torch.arange(64.0)
    name = "model.layers.0.self_attn.q_proj.bias"
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.bias": torch.from_numpy(permuted(bias.numpy(), 4))})
    model = FakeModel(shapes={name: (64,)})
    load_model(model, checkpoint(path, file_format="gguf"), CONFIG)
    assert torch.equal(model.loaded[name], bias)


def test_gguf_rope_freqs_is_not_a_weight(tmp_path):
    values = tensors()
    path = write_gguf(tmp_path / "m.gguf", {**values, "rope_freqs.weight": torch.ones(8)})
    model = FakeModel()
    load_model(model, checkpoint(path, file_format="gguf"), CONFIG)
    assert_equal(model.loaded, values)


def test_split_gguf(tmp_path):
    values = tensors()
    names = list(values)
    parts = [
        write_gguf(tmp_path / f"m-0000{i}-of-00002.gguf", {name: values[name] for name in some})
        for i, some in ((1, names[:2]), (2, names[2:]))
    ]
    model = FakeModel()
    load_model(model, checkpoint(*parts, file_format="gguf"), CONFIG)
    assert_equal(model.loaded, values)


def refused(model: FakeModel, source: Checkpoint, message: str, monkeypatch) -> str:
    """Loading fails with `message`, and no weight was read or given to the model."""
    monkeypatch.setattr(weights, "read_bytes", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(model, source, CONFIG)
    assert (model.loaded, model.finished) == ({}, 0)
    return str(caught.value)


def save(tmp_path, values):
    save_file(values, tmp_path / "model.safetensors")
    return checkpoint(tmp_path / "model.safetensors")


def test_missing_tensor(tmp_path, monkeypatch):
    values = tensors()
    del values[K]
    source = save(tmp_path, values)
    message = refused(FakeModel(), source, rf"missing tensor: {re.escape(K)} \[32, 64\]; expected by", monkeypatch)
    assert str(tmp_path / "model.safetensors") in message


def test_many_missing_tensors_are_counted(tmp_path, monkeypatch):
    shapes = SHAPES | {f"extra.{i}": (1,) for i in range(9)}
    refused(FakeModel(shapes), save(tmp_path, tensors()), r"missing tensors: extra\.0 .* and 4 more", monkeypatch)


def test_unexpected_tensor(tmp_path, monkeypatch):
    source = save(tmp_path, {**tensors(), "model.layers.1.mystery.weight": torch.zeros(2)})
    message = r"model\.safetensors: tensor 'model\.layers\.1\.mystery\.weight'; not part of the model described by"
    refused(FakeModel(), source, message, monkeypatch)


def test_ignorable_tensor(tmp_path):
    values = tensors()
    model = FakeModel()
    load_model(
        model,
        save(tmp_path, {**values, "model.layers.0.rotary_emb.inv_freq": torch.zeros(2, dtype=torch.int64)}),
        CONFIG,
    )
    assert_equal(model.loaded, values)


@pytest.mark.parametrize("shape", [(32, 63), (64, 32), (2048,), (1, 32, 64)])
def test_wrong_shape(tmp_path, monkeypatch, shape):
    source = save(tmp_path, {**tensors(), K: torch.zeros(shape)})
    message = rf"tensor '{re.escape(K)}' has shape {re.escape(str(list(shape)))}, expected \[32, 64\]"
    refused(FakeModel(), source, message, monkeypatch)


def test_wrong_shape_in_gguf(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", {**tensors(), K: torch.zeros(32, 96)})
    message = r"m\.gguf: tensor 'blk\.0\.attn_k\.weight' has shape \[32, 96\], expected \[32, 64\]"
    refused(FakeModel(), checkpoint(path, file_format="gguf"), message, monkeypatch)


def test_unsupported_types(tmp_path, monkeypatch):
    source = save(tmp_path, {**tensors(), K: torch.zeros(32, 64, dtype=torch.int8)})
    refused(FakeModel(), source, rf"'{re.escape(K)}' has type I8, expected one of F64, F32", monkeypatch)
    path = write_gguf(tmp_path / "m.gguf", tensors(), "Q8_0")
    data = path.read_bytes()
    # 8 is Q8_0 and 20 is IQ4_NL, whose blocks are shorter, so that the file stays long enough.
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at] == 8
    path.write_bytes(data[:at] + bytes([20]) + data[at + 1 :])
    message = r"'blk\.0\.attn_v\.weight' has GGUF type IQ4_NL, supported are BF16"
    refused(FakeModel(), checkpoint(path, file_format="gguf"), message, monkeypatch)


@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
def test_cut_off_file(tmp_path, monkeypatch, file_format):
    path = tmp_path / f"m.{file_format}"
    if file_format == "gguf":
        write_gguf(path, tensors(), "Q4_0")
    else:
        save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    message = rf"m\.{file_format}: tensor '.*' lies at bytes \d+ to \d+, but the file has only \d+ bytes; it is cut off"
    refused(FakeModel(), checkpoint(path, file_format=file_format), message, monkeypatch)


def test_shard_that_vanished(tmp_path, monkeypatch):
    save(tmp_path, tensors())
    source = checkpoint(tmp_path / "model.safetensors", tmp_path / "gone.safetensors")
    refused(FakeModel(), source, r"gone\.safetensors: cannot be read: No such file", monkeypatch)


def test_the_same_tensor_twice(tmp_path, monkeypatch):
    for name in "ab":
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    source = checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    refused(FakeModel(), source, r"b\.safetensors: tensor '.*' is also in .*a\.safetensors", monkeypatch)


@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
def test_file_that_shrinks_after_the_check(tmp_path, file_format):
    """Reading through a mapping would end the process with SIGBUS here."""
    path = tmp_path / f"m.{file_format}"
    if file_format == "gguf":
        write_gguf(path, tensors())
    else:
        save_file(tensors(), path)
    found = open_weights(checkpoint(path, file_format=file_format), CONFIG, FakeModel())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="the file ended 100 bytes early"):
        for weight in found:
            weight.read(torch.float32)


def dummy(tmp_path) -> Checkpoint:
    return Checkpoint(
        name="x", format="config", config_path=str(tmp_path / "config.json"), weight_files=(), tokenizer_path=""
    )


def test_dummy_weights(tmp_path):
    model, again, other = FakeModel(), FakeModel(), FakeModel()
    load_model(model, dummy(tmp_path), CONFIG, seed=3)
    load_model(again, dummy(tmp_path), CONFIG, seed=3)
    load_model(other, dummy(tmp_path), CONFIG, seed=4)
    assert_equal(model.loaded, again.loaded)
    assert {name: tuple(value.shape) for name, value in model.loaded.items()} == SHAPES
    assert torch.equal(model.loaded["model.norm.weight"], torch.ones(64))
    assert not torch.equal(model.loaded[Q], other.loaded[Q])
    assert not torch.equal(model.loaded[K], model.loaded[V])
    assert 0.018 < model.loaded[Q].std() < 0.022


def test_dummy_values_do_not_depend_on_dtype():
    weight = weights.DummyWeight("w", (70, 33), seed=0)
    full = weight.read(torch.float32)
    assert torch.equal(weight.read(torch.bfloat16), full.to(torch.bfloat16))
    assert full.unique().numel() > 2000


def test_no_bar_without_a_terminal(tmp_path, capsys):
    load_model(FakeModel(), dummy(tmp_path), CONFIG)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_model(FakeModel(), dummy(tmp_path), CONFIG)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loading weights" in captured.err
    load_model(FakeModel(), dummy(tmp_path), CONFIG, progress=False)
    assert capsys.readouterr().err == ""
