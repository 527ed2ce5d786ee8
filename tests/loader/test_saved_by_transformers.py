"""Folders as `save_pretrained` writes them: resolved, their config read, every weight equal to the model's own."""

import pytest
import torch
import transformers

from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import ModelConfig, read_model_config
from tokenspeed.loader.load import open_weights

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": (
        transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
        transformers.LlamaForCausalLM,
    ),
    "qwen2": (transformers.Qwen2Config(**SIZES), transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config(**SIZES, head_dim=32), transformers.Qwen3ForCausalLM),
}


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_weights_and_config(tmp_path, family, shard_size):
    config, model_class = CASES[family]
    model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    checkpoint = resolve_checkpoint(str(tmp_path))
    assert (len(checkpoint.weight_files) > 1) == (shard_size == "60KB")
    found = read_model_config(checkpoint)
    check_config(found, config, model_class.__name__)
    state = model.state_dict()
    read = {weight.name: weight.read(torch.bfloat16) for weight in open_weights(checkpoint, found, model)}
    expected = state.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert read.keys() == expected
    for name in expected:
        assert torch.equal(read[name], state[name]), name


def check_config(found: ModelConfig, config, architecture: str) -> None:
    assert found.architecture == architecture
    assert found.dtype == "bfloat16"
    assert found.tie_word_embeddings == config.tie_word_embeddings
    assert found.head_dim == (getattr(config, "head_dim", None) or 16)
    assert found.rope.kind == config.rope_parameters["rope_type"]
    assert found.rope.theta == config.rope_parameters["rope_theta"]
    assert found.attention_bias == (architecture == "Qwen2ForCausalLM")
    assert found.max_position == 512
