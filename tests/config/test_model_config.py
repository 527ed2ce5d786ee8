"""config.json and GGUF metadata to ModelConfig: every spelling, and an error by file and field for what cannot run."""

import json
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.model import ModelConfig, read_model_config
from tokenspeed.config.rope import llama3_from_factors
from tokenspeed.protocol.errors import CheckpointError, ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def read(tmp_path):
    """Writes a config (LLAMA, changed; a value of ... removes the field) and reads it."""

    def read_with(overrides=None, generation=None, **changes) -> ModelConfig:
        values = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(checkpoint_at(tmp_path / "config.json"), overrides)

    return read_with


def checkpoint_at(path, name="x") -> Checkpoint:
    file_format = "gguf" if path.suffix == ".gguf" else "config"
    return Checkpoint(
        name=name, format=file_format, config_path=str(path), weight_files=(), tokenizer_path=str(path.parent)
    )


def test_llama(read):
    config = read()
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position=256,
        rms_norm_eps=1e-5,
        rope=config.rope,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)


def test_llama_biases(read):
    config = read(attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_qwen2_has_biases_on_q_k_v_only(read):
    config = read(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True)
    assert (config.attention_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert config.tie_word_embeddings
    assert not config.qk_norm


def test_qwen3_has_qk_norm_and_its_own_head_dim(read):
    config = read(architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (config.qk_norm, config.head_dim, config.attention_bias) == (True, 32, False)
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_logit_cap_of_attention(read):
    assert read(attn_logit_softcapping=None).attention_logit_cap is None
    assert read(attn_logit_softcapping=50).attention_logit_cap == 50.0
    assert read({"attn_logit_softcapping": 30.0}).attention_logit_cap == 30.0


def test_heads_without_grouping(read):
    assert read(num_key_value_heads=...).num_kv_heads == 4
    assert read(num_key_value_heads=None).num_kv_heads == 4


def test_architecture_from_model_type(read):
    assert read(architectures=...).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": ...}, "float32"),
    ],
)
def test_dtype(read, changes, expected):
    assert read(**changes).dtype == expected


def test_dtype_of_the_file_when_the_config_is_silent(tmp_path):
    save_file({"a": np.zeros(2, np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "torch_dtype"}))
    checkpoint = Checkpoint(
        name="x",
        format="safetensors",
        config_path=str(tmp_path / "config.json"),
        weight_files=(str(tmp_path / "model.safetensors"),),
        tokenizer_path=str(tmp_path),
    )
    assert read_model_config(checkpoint).dtype == "float16"


def test_generation_config(read):
    config = read(
        generation={"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    )
    assert config.eos_token_ids == (2, 7)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}


@pytest.mark.parametrize("eos", [None, ..., -1, []])
def test_no_eos(read, eos):
    assert read(eos_token_id=eos).eos_token_ids == ()


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "old"])
def test_llama3_rope_in_every_spelling(read, spelling):
    if spelling == "rope_parameters":
        changes = {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5}}
    else:
        kind = "type" if spelling == "old" else "rope_type"
        changes = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, kind: "llama3"}}
    config = read(max_position_embeddings=131072, **changes)
    rope = config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 5e5, 8.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert config.max_position == 131072


@pytest.mark.parametrize(
    ("rope", "trained", "expected"),
    [
        ({"type": "linear", "factor": 4}, 256, 1024),
        ({"type": "linear", "factor": 4, "original_max_position_embeddings": 64}, 64, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 256, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"type": "dynamic", "factor": 2.0}, 256, 256),
    ],
)
def test_longest_context(read, rope, trained, expected):
    config = read(rope_scaling=rope)
    assert config.rope.kind == rope["type"]
    assert config.rope.original_max_position == trained
    assert config.max_position == expected


def test_yarn_fields(read):
    rope = {
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    }
    found = read(rope_scaling=rope).rope
    assert (found.beta_fast, found.beta_slow, found.mscale, found.mscale_all_dim) == (16.0, 1.0, 0.7, 0.5)
    assert (found.truncate, found.attention_factor) == (False, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, r"architectures is \['FooForCausalLM'\].*LlamaForCausalLM, Qwen2"),
        ({"architectures": ..., "model_type": "foo"}, "architectures is missing.*Qwen3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list"),
        ({"hidden_size": ...}, "hidden_size is missing, expected a whole number from 1"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number from 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, expected a whole number from 1 to 4096"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776, expected a whole number from 1 to"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads, which is 4"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "hidden_size is 64, expected a multiple of num_attention",
        ),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn', expected one of float32"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config asks for 'gptq', which is not supported",
        ),
        ({"compression_config": {"quant_method": "x"}}, "compression_config asks for 'x'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope_scaling.type is 'longrope', expected one of default",
        ),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling.rope_type is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5, expected 1 or more"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "original_max_position_embeddings is missing"),
        (
            {"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0, expected more",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rope for each layer type"),
        ({"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_errors_name_file_field_and_expectation(read, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**changes)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_sliding_window(read):
    window = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32}
    with pytest.raises(CheckpointError, match=r"use_sliding_window is True.*in layers 1 and up\) is not supported yet"):
        read(**window, max_window_layers=1)
    with pytest.raises(CheckpointError, match="layer_types has layers other than full_attention"):
        read(**window, layer_types=["full_attention", "sliding_attention"])
    # No layer slides in these.
    read(**window, max_window_layers=2)
    read(**{**window, "use_sliding_window": False})
    read(**window, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_config_that_is_not_an_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_model_config(checkpoint_at(tmp_path / "config.json"))


def test_overrides(read):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read({"rope_scaling": yarn, "rope_theta": 1e6, "torch_dtype": "float16", "max_position_embeddings": 512})
    assert (config.rope.kind, config.rope.theta, config.max_position, config.dtype) == ("yarn", 1e6, 1024, "float16")


@pytest.mark.parametrize("override", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}])
@pytest.mark.parametrize(
    "file", [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}]
)
def test_an_override_wins_whatever_the_spelling(read, override, file):
    """An old-spelling override used to lose against a new-spelling file."""
    assert read(override, rope_theta=..., **{k: v for k, v in file.items() if k != "rope_theta"}).rope.theta == 1e6


def test_override_merges_objects_and_null_removes(read):
    scaling = {"type": "yarn", "factor": 4.0}
    assert read({"rope_scaling": {"factor": 2.0}}, rope_scaling=scaling).rope.factor == 2.0
    assert read({"rope_scaling": None}, rope_scaling=scaling).rope.kind == "default"


def test_override_of_a_field_that_is_not_read(read):
    with pytest.raises(ConfigError, match=r"--hf-overrides: 'use_cache' is not read by any family; read are architect"):
        read({"use_cache": False})


def test_reading_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys; from tokenspeed.checkpoint.resolve import resolve_checkpoint as r;"
        "from tokenspeed.config.model import read_model_config as m;"
        f"m(r({str(tmp_path)!r}, load_format='dummy')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def write_gguf(path, arch="llama", tensors=None, skip=(), **extra):
    """A GGUF file with the metadata of LLAMA; `extra` adds or replaces keys, given without the architecture."""
    keys = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e5,
    }
    keys.update({name.replace("__", "."): value for name, value in extra.items()})
    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        if name in skip:
            continue
        full = name if name.startswith(("tokenizer.", "general.")) else f"{arch}.{name}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    for name, value in (tensors or {"token_embd.weight": np.zeros((100, 64), np.float32)}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def read_gguf_config(tmp_path):
    def read_with(**named) -> ModelConfig:
        return read_model_config(checkpoint_at(write_gguf(tmp_path / "m.gguf", **named)))

    return read_with


def test_gguf_llama(read_gguf_config):
    config = read_gguf_config(tokenizer__ggml__bos_token_id=1, tokenizer__ggml__eos_token_id=2)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position=256,
        rms_norm_eps=1e-5,
        rope=config.rope,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert (config.rope.kind, config.rope.theta) == ("default", 5e5)


def test_gguf_features_from_tensors(read_gguf_config):
    row = np.zeros(64, np.float32)
    table = np.zeros((100, 64), np.float16)
    tensors = {"token_embd.weight": table, "output.weight": table, "blk.0.attn_q.bias": row}
    config = read_gguf_config(arch="qwen2", tensors=tensors)
    assert (config.architecture, config.tie_word_embeddings, config.dtype) == ("Qwen2ForCausalLM", False, "float16")
    assert (config.attention_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    config = read_gguf_config(tensors={**tensors, "blk.0.attn_output.bias": row, "blk.0.ffn_up.bias": row})
    assert (config.attention_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_gguf_qwen3_head_dim(read_gguf_config):
    config = read_gguf_config(arch="qwen3", attention__key_length=32, attention__value_length=32)
    assert (config.architecture, config.head_dim, config.qk_norm) == ("Qwen3ForCausalLM", 32, True)


def test_gguf_end_tokens(read_gguf_config):
    tokens = ["a", "<|eot_id|>", "b", "<|im_end|>"]
    ids = {"tokenizer__ggml__eos_token_id": 0, "tokenizer__ggml__tokens": tokens}
    assert read_gguf_config(**ids).eos_token_ids == (0,)
    assert read_gguf_config(**ids, tokenizer__ggml__eot_token_id=2, tokenizer__ggml__eom_token_id=3).eos_token_ids == (
        0,
        2,
        3,
    )
    # A file from before eot_token_id existed: the template shows which token ends a turn.
    template = "{{ message.content }}<|eot_id|>"
    assert read_gguf_config(**ids, tokenizer__chat_template=template).eos_token_ids == (0, 1)


def test_gguf_rope_scaling(read_gguf_config):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
    config = read_gguf_config(**yarn)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("yarn", 4.0, 64)
    assert config.max_position == 256
    linear = read_gguf_config(rope__scale_linear=2.0)
    assert (linear.rope.kind, linear.rope.factor, linear.max_position) == ("linear", 2.0, 512)
    assert read_gguf_config(rope__scaling__type="none", rope__scaling__factor=4.0).rope.kind == "default"


def llama3_factors(dim, theta, length, low, high, factor):
    """The rule as the converter applies it, for one more independent writing of it."""
    factors = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * theta ** (i / dim)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def test_gguf_rope_freqs_becomes_the_llama3_rope(read_gguf_config):
    factors = np.array(llama3_factors(64, 5e5, 8192, 1.0, 4.0, 32.0), np.float32)
    tensors = {"token_embd.weight": np.zeros((100, 64), np.float32), "rope_freqs.weight": factors}
    rope = read_gguf_config(tensors=tensors, context_length=131072).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


@pytest.mark.parametrize(("length", "low", "high"), [(8192, 1, 4), (4096, 2, 8), (2048, 1, 3), (16384, 0.5, 6)])
@pytest.mark.parametrize("dim", [64, 128])
def test_llama3_parameters_give_the_factors_back(length, low, high, dim):
    factors = llama3_factors(dim, 5e5, length, low, high, 16.0)
    found = llama3_from_factors([float(np.float32(f)) for f in factors], 5e5, "x")
    again = llama3_factors(
        dim, 5e5, found["original_max_position_embeddings"], 1.0, found["high_freq_factor"], found["factor"]
    )
    np.testing.assert_allclose(again, factors, rtol=1e-3)


def test_factors_that_are_not_llama3():
    assert llama3_from_factors([1.0] * 32, 5e5, "x") == {}
    with pytest.raises(CheckpointError, match=r"x: its divisors 1 \.\.\. 3 do not follow the llama3 rule"):
        llama3_from_factors([1.0] * 8 + [2.0] * 12 + [1.5] * 8 + [3.0] * 4, 5e5, "x")
    with pytest.raises(CheckpointError, match="not positive numbers"):
        llama3_from_factors([1.0, math.nan], 5e5, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma3"}, "general.architecture is 'gemma3', expected one of llama, qwen2, qwen3"),
        ({"skip": ("block_count",)}, "llama.block_count is missing"),
        ({"skip": ("attention.layer_norm_rms_epsilon",)}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"expert_count": 8}, "llama.expert_count is 8, expected none"),
        ({"attention__sliding_window": 8}, "llama.attention.sliding_window is 8"),
        ({"attention__head_count_kv": [2, 1]}, r"llama.attention.head_count_kv is \[2, 1\], expected a whole number"),
        ({"attention__value_length": 8}, "llama.attention.value_length is 8, expected attention.key_length"),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "is 'longrope', expected one of"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__attn_factor": 1.5},
            "attn_factor is 1.5",
        ),
        (
            {"tokenizer__ggml__tokens": [str(i) for i in range(101)]},
            "'token_embd.weight' has 100 rows, expected at least the 101",
        ),
        ({"tensors": {"rope_freqs.weight": np.zeros((2, 2), np.float32)}, "vocab_size": 9}, "expected F32 of shape"),
    ],
)
def test_gguf_errors(read_gguf_config, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_config(**changes)
    assert "m.gguf" in str(caught.value)


def test_gguf_sampling_defaults(read_gguf_config):
    config = read_gguf_config(**{"general.sampling.temp": 0.7, "general.sampling.top_k": 20})
    assert config.sampling_defaults == {"temperature": 0.7, "top_k": 20.0}


def test_default_model(default_checkpoint):
    config = read_model_config(default_checkpoint)
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (9, 3, 64, 8192)
    assert (config.qtype, config.dtype, config.tie_word_embeddings) == ("Q4_1", "bfloat16", True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert (config.rope.theta, config.rms_norm_eps) == (1e5, 1e-5)
