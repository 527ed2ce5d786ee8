"""Configs of GPT-OSS and Qwen3 MoE: what is read, in which spellings, and what is refused by file, field and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.model import ModelConfig, MoeConfig, read_model_config
from tokenspeed.config.precision_choices import quantize_on_load
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.config.rope import RopeConfig
from tokenspeed.protocol.errors import CheckpointError, ConfigError

np = pytest.importorskip("numpy")

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes a config (changed; a value of ... removes the field) and reads it."""

    def read_with(base: dict[str, Any], overrides: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        values = {name: value for name, value in (base | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model_config(checkpoint_of(tmp_path), overrides)

    return read_with


def checkpoint_of(folder: Path, *files: str) -> Checkpoint:
    return Checkpoint(
        name="x",
        format="safetensors" if files else "config",
        config_path=str(folder / "config.json"),
        weight_files=tuple(str(folder / file) for file in files),
        tokenizer_path=str(folder),
    )


def test_gpt_oss_as_published(read: Read) -> None:
    config = read(GPT_OSS)
    assert config.moe == MoeConfig(
        num_experts=32,
        top_k=4,
        intermediate_size=2880,
        scoring="topk_softmax",
        renormalize=False,
        router="router",
        router_bias=True,
        expert_bias=True,
        limit=7.0,
        alpha=1.702,
        layout="interleaved",
    )
    assert config.layer_windows == (128, None, 128, None)
    assert config.attention_sinks and config.attention_bias and config.o_bias and not config.qk_norm
    assert config.rope == RopeConfig(
        kind="yarn", theta=150000.0, factor=32.0, original_max_position=4096, truncate=False
    )
    assert config.max_position == 131072
    assert config.quantization is not None
    assert (config.quantization.method, config.quantization.granularity) == ("mxfp4", "group")


def test_gpt_oss_in_the_spelling_of_transformers_5(read: Read) -> None:
    rope = {**GPT_OSS["rope_scaling"], "rope_theta": 150000.0}
    new = read(GPT_OSS, rope_scaling=..., rope_theta=..., rope_parameters=rope, torch_dtype=..., dtype="bfloat16",
               experts_per_token=..., swiglu_alpha=1.702, initial_context_length=...)  # fmt: skip
    assert new == read(GPT_OSS)


def test_gpt_oss_in_the_spelling_of_the_first_release(read: Read) -> None:
    assert read(GPT_OSS, num_experts_per_tok=..., num_local_experts=..., num_experts=32) == read(GPT_OSS)


def test_gpt_oss_without_what_its_class_knows(read: Read) -> None:
    """Defaults of GptOssConfig: alternating windows of 128, YaRN, head_dim 64, biases, the clamp at 7."""
    names = ("layer_types", "sliding_window", "rope_scaling", "rope_theta", "head_dim", "attention_bias")
    assert read(GPT_OSS, **{name: ... for name in names}, swiglu_limit=...) == read(GPT_OSS)


def test_gpt_oss_without_windows(read: Read) -> None:
    assert read(GPT_OSS, layer_types=["full_attention"] * 4).layer_windows == ()


def test_gpt_oss_unquantized(read: Read) -> None:
    assert read(GPT_OSS, quantization_config=...).quantization is None


def test_qwen3_moe_as_published(read: Read) -> None:
    config = read(QWEN)
    assert config.moe == MoeConfig(num_experts=128, top_k=8, intermediate_size=768, renormalize=True, layout="fused")
    assert config.qk_norm and not config.attention_bias and config.layer_windows == ()
    assert read(QWEN, num_experts=..., num_local_experts=128) == config
    assert not read(QWEN, norm_topk_prob=...).moe.renormalize  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3)),
        ({"mlp_only_layers": None}, ()),
    ],
)
def test_dense_layers(read: Read, fields: dict[str, Any], dense: tuple[int, ...]) -> None:
    config = read(QWEN, **fields)
    assert config.moe is not None and config.moe.dense_layers == dense


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["model.embed_tokens.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"], "per_expert"),
        (["model.layers.0.mlp.experts.gate_up_proj"], "fused"),
    ],
)
def test_layout_is_found_in_the_files(tmp_path: Path, names: list[str], layout: str) -> None:
    """The first shard may have no expert at all."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    save_file({"lm_head.weight": np.zeros(2, np.float32)}, tmp_path / "1.safetensors")
    save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "2.safetensors")
    config = read_model_config(checkpoint_of(tmp_path, "1.safetensors", "2.safetensors"))
    assert config.moe is not None and config.moe.layout == layout
    with pytest.raises(
        CheckpointError, match=r"config.json: describes expert layers, but no tensor of .*1.safetensors"
    ):
        read_model_config(checkpoint_of(tmp_path, "1.safetensors"))


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types is ['full_attention'], expected a list of 4 times"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 4}, "expected a list of 4 times sliding_attention or full"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window is missing"),
        (GPT_OSS, {"sliding_window": 0}, "sliding_window is 0, expected a whole number from 1"),
        (GPT_OSS, {"num_experts_per_tok": 33}, "num_experts_per_tok is 33, expected a whole number from 1 to 32"),
        (GPT_OSS, {"num_experts_per_tok": ..., "experts_per_token": ...}, "num_experts_per_tok is missing"),
        (GPT_OSS, {"num_local_experts": 100000}, "num_local_experts is 100000, expected a whole number from 1 to 4096"),
        (GPT_OSS, {"num_local_experts": ...}, "num_local_experts is missing"),
        (GPT_OSS, {"num_experts": 31}, "num_experts is 31, expected 32, which num_local_experts is"),
        (GPT_OSS, {"experts_per_token": 2}, "experts_per_token is 2, expected 4, which num_experts_per_tok is"),
        (QWEN, {"num_experts": ...}, "num_experts is missing"),
        (QWEN, {"layer_types": ["full_attention"] * 3}, "layer_types is ['full_attention', "),
        (GPT_OSS, {"swiglu_limit": -1}, "swiglu_limit is -1, expected a number above 0"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        (
            GPT_OSS,
            {
                "quantization_config": {
                    "quant_method": "mxfp4",
                    "modules_to_not_convert": ["model.layers.3.mlp.experts"],
                }
            },
            "modules_to_not_convert is ['model.layers.3.mlp.experts'], expected no experts in it",
        ),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "quark"}},
            "asks for 'quark', which is not supported (fp8, compressed-tensors and modelopt are, with e4m3 weights, "
            "and mxfp4 for experts); use the model as first published or, if it has no experts, a GGUF file of it",
        ),
        (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization by fp8 is not read for GptOss"),
        (QWEN, {"quantization_config": GPT_OSS["quantization_config"]}, "mxfp4 is read for GptOssForCausalLM only"),
        (QWEN, {"mlp_only_layers": [4]}, "mlp_only_layers is [4], expected a list of layers from 0 to 3"),
        (QWEN, {"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list of layers"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected a whole number from 1"),
        (QWEN, {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        (
            QWEN,
            {"use_sliding_window": True, "sliding_window": 4096},
            "use_sliding_window is True, expected false: sliding-window attention (here in layers 0 and up)",
        ),
    ],
)
def test_refused_by_file_field_and_value(
    read: Read, base: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read(base, **fields)
    assert message in str(error.value) and "config.json" in str(error.value)


def test_overrides_reach_the_experts(read: Read) -> None:
    config = read(GPT_OSS, {"num_experts_per_tok": 2, "swiglu_limit": 5.0, "sliding_window": 64})
    assert config.moe is not None
    assert (config.moe.top_k, config.moe.limit, config.layer_windows[0]) == (2, 5.0, 64)


@pytest.mark.parametrize("name", ["experts_per_token", "num_experts_per_tok"])
def test_an_override_in_either_spelling_wins(read: Read, name: str) -> None:
    """The bug: `--hf-overrides` of experts_per_token or num_experts was read, and lost without a word against the
    file's other spelling."""
    moe = read(GPT_OSS, {name: 2, "num_experts": 16}).moe
    assert moe is not None and (moe.top_k, moe.num_experts) == (2, 16)


def test_overrides_of_another_family_are_refused(read: Read) -> None:
    """The bug: `--hf-overrides '{"moe_intermediate_size": 3}'` was taken for a GPT-OSS, and changed nothing."""
    with pytest.raises(ConfigError, match="'moe_intermediate_size' is not read for GptOssForCausalLM; of exp"):
        read(GPT_OSS, {"moe_intermediate_size": 3})
    with pytest.raises(ConfigError, match="'swiglu_limit' is not read for Qwen3MoeForCausalLM; of expert layers it"):
        read(QWEN, {"swiglu_limit": 3.0})


def test_mxfp4_asked_for(read: Read) -> None:
    """`--quantization mxfp4` names what the checkpoint has; it makes none of another."""
    assert quantize_on_load(EngineArgs(quantization="mxfp4"), read(GPT_OSS)) is None
    with pytest.raises(ConfigError, match=r"--quantization is fp8, but .* by mxfp4; leave the flag out, or .*: mxfp4"):
        quantize_on_load(EngineArgs(quantization="fp8"), read(GPT_OSS))
    with pytest.raises(ConfigError, match=r"--quantization is mxfp4, but the checkpoint is not quantized"):
        quantize_on_load(EngineArgs(quantization="mxfp4"), read(QWEN))


def test_described() -> None:
    config = QuantizationConfig(method="mxfp4", granularity="group", activations="none")
    assert config.described == "of the mxfp4 checkpoint, a scale a group of 32, made for activations: none"
