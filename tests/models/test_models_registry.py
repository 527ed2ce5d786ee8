"""Contract of every family file, and how a family is found."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
import torch
from memory_weight import MemoryWeight
from model_harness import build_unloaded, with_pool

from tokenspeed.cache.spec import group_layers
from tokenspeed.config.model import SUPPORTED_ARCHITECTURES, ModelConfig, RopeConfig
from tokenspeed.models.registry import discover, examples
from tokenspeed.protocol.errors import CheckpointError

EXAMPLES = {example.architecture: example for example in examples()}
family = pytest.mark.parametrize("config", EXAMPLES.values(), ids=EXAMPLES.keys())


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def test_every_architecture_has_an_example() -> None:
    assert set(EXAMPLES) == set(discover())


@family
def test_rules_and_shapes_name_the_same_tensors(config: ModelConfig) -> None:
    model = build_unloaded(config, 4)
    assert model.load_rules().keys() == model.expected_shapes().keys()
    assert not any(model.ignorable(name) for name in model.load_rules())
    assert model.ignorable("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert model.ignorable("lm_head.weight") == config.tie_word_embeddings
    assert not model.ignorable("model.layers.0.self_attn.q_proj.weight_scale")


@family
def test_example_loads_and_runs(config: ModelConfig) -> None:
    model = build_unloaded(config, 4)
    state = random_state(model.expected_shapes())
    for name, rule in model.load_rules().items():
        rule(MemoryWeight(name, state[name]))
    model.finish()
    engine = with_pool(model, config, 4, 8, torch.float32)
    logits = engine.step([(engine.add([1, 2, 3, 4, 5], 5), 5)])[0]
    assert logits.shape == (5, config.vocab_size)
    assert logits.isfinite().all()


@family
def test_every_tensor_is_needed(config: ModelConfig) -> None:
    """A model that was given all but one tensor must not finish."""
    shapes = build_unloaded(config, 4).expected_shapes()
    state = random_state(shapes)
    for missing in shapes:
        model = build_unloaded(config, 4)
        for name, rule in model.load_rules().items():
            if name != missing:
                rule(MemoryWeight(name, state[name]))
        with pytest.raises(CheckpointError, match="not in the checkpoint"):
            model.finish()


@family
def test_a_wrong_shape_is_refused_by_name(config: ModelConfig) -> None:
    model = build_unloaded(config, 4)
    for name, shape in model.expected_shapes().items():
        wrong = MemoryWeight(name, torch.zeros((shape[0] + 1, *shape[1:])))
        if name.endswith(("gate_proj.weight", "q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            continue  # room below them in the merged weight: the loader's check against expected_shapes catches these
        with pytest.raises(CheckpointError, match=name):
            model.load_rules()[name](wrong)


@family
def test_cache_specs(config: ModelConfig) -> None:
    specs = build_unloaded(config, 4).cache_specs()
    assert [spec.layer for spec in specs] == list(range(config.num_layers))
    groups = group_layers(specs, 16)
    assert {group.window for group in groups} == set(config.layer_windows or (None,))
    page_bytes = 16 * 2 * config.num_kv_heads * config.head_dim * 4
    assert sum(spec.bytes_per_token * 16 for spec in specs) == config.num_layers * page_bytes


def test_unknown_architecture_names_those_that_exist() -> None:
    config = msgspec.structs.replace(EXAMPLES["LlamaForCausalLM"], architecture="MambaForCausalLM")
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        build_unloaded(config, 4)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Qwen2ForCausalLM", {"attention_bias": False}, "biases on q, k and v"),
        ("Qwen3ForCausalLM", {"qk_norm": False}, "norms on q and k"),
        ("Qwen3MoeForCausalLM", {"qk_norm": False}, "experts and norms on q and k"),
        ("Qwen3MoeForCausalLM", {"moe": None}, "experts and norms on q and k"),
        ("GptOssForCausalLM", {"moe": None}, "experts and attention sinks"),
        ("GptOssForCausalLM", {"attention_sinks": False}, "experts and attention sinks"),
        ("LlamaForCausalLM", {"rope": RopeConfig(partial_rotary_factor=0.5)}, "partial_rotary_factor 0.5"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_a_config_that_contradicts_its_family(architecture: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_unloaded(msgspec.structs.replace(EXAMPLES[architecture], **fields), 4)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_rope_without_its_trained_context(kind: Literal["llama3", "yarn"]) -> None:
    rope = RopeConfig(kind=kind, factor=8.0)
    config = msgspec.structs.replace(EXAMPLES["LlamaForCausalLM"], rope=rope)
    with pytest.raises(CheckpointError, match="original_max_position_embeddings"):
        build_unloaded(config, 4)


def test_every_accepted_architecture_has_a_family_and_an_example() -> None:
    """What the config reader accepts and what the families build is one list."""
    assert set(SUPPORTED_ARCHITECTURES) == set(discover())
    assert {example.architecture for example in examples()} == set(discover())
