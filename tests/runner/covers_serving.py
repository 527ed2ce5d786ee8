"""python covers_serving.py MODEL SEED: prints the kernel variants that the warm-up misses, then `covered` if none."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
from absent_gpu import AbsentGpu, Variant, absent_gpu

from tokenspeed.config.gpu_choices import MAX_PREFILL_TOKENS, capture_ladder, prefill_ladder
from tokenspeed.config.model import ModelConfig, MoeConfig
from tokenspeed.config.quantization import QuantizationConfig
from tokenspeed.config.rope import RopeConfig
from tokenspeed.runner import trial_steps
from tokenspeed.runner.compile_start import twin_model
from tokenspeed.runner.warm_up import representatives, warm_up_plans

SEQS, CONTEXT, BUDGET, PAGE = 256, 8192, 8192, 64


def shape(architecture: str, sizes: tuple[int, ...], **others: object) -> ModelConfig:
    hidden, inner, heads, kv_heads, head_dim, vocab = sizes
    return ModelConfig(
        architecture=architecture, hidden_size=hidden, intermediate_size=inner, num_layers=4, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, max_position=CONTEXT, rms_norm_eps=1e-6,
        rope=RopeConfig(), **others,
    )  # fmt: skip


MODELS = {
    "qwen3-8b": shape("Qwen3ForCausalLM", (4096, 12288, 32, 8, 128, 151936), qk_norm=True),
    "qwen3-30b-a3b": shape(
        "Qwen3MoeForCausalLM", (2048, 6144, 32, 4, 128, 151936), qk_norm=True,
        moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768),
    ),
    "gpt-oss-20b": shape(
        "GptOssForCausalLM", (2880, 2880, 64, 8, 64, 201088), attention_bias=True, o_bias=True, attention_sinks=True,
        layer_windows=(128, None) * 2,
        quantization=QuantizationConfig(method="mxfp4", granularity="group", activations="none"),
        moe=MoeConfig(
            num_experts=32, top_k=4, intermediate_size=2880, scoring="topk_softmax", router="router", router_bias=True,
            expert_bias=True, limit=7.0, alpha=1.702, layout="interleaved",
        ),
    ),
}  # fmt: skip


def missing(model: str, seed: int) -> set[Variant]:
    rng = random.Random(seed)
    ladder, prompts = capture_ladder(SEQS), prefill_ladder(MAX_PREFILL_TOKENS)
    with pytest.MonkeyPatch.context() as patch, absent_gpu(patch) as launched:
        gpu = AbsentGpu(twin_model(MODELS[model]), SEQS, CONTEXT)
        has_experts = MODELS[model].moe is not None
        gpu.capture(representatives(ladder), representatives(prompts))
        for plan in warm_up_plans(SEQS, CONTEXT, BUDGET, PAGE, len(gpu.groups), has_experts):
            gpu.run(plan)
        known = set(launched)  # by the compile workers
        launched.clear()
        gpu = AbsentGpu(MODELS[model], SEQS, CONTEXT)
        config = SimpleNamespace(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=SEQS,
            max_model_len=CONTEXT,
            page_size=PAGE,
            capture_sizes=ladder,
        )
        for sizing in (
            trial_steps.recorded_step,
            trial_steps.decode_step,
            trial_steps.long_prompts_step,
            trial_steps.many_prompts_step,
        ):
            gpu.run(sizing(config, len(gpu.groups)))
        gpu.capture(ladder, prompts)
        for _ in range(12):  # prompts, some behind a prefix, and crowds of them
            gpu.run(gpu.rows(rng.randrange(1, CONTEXT)))
            gpu.run(gpu.rows(rng.randrange(2, 200), *[1] * rng.randrange(1, 9), start=rng.randrange(1, 100)))
        for crowd in (2, 3, 5, 16, 17, 33, 64, 65, 129, *rng.sample(range(2, SEQS), 8)):
            gpu.run(gpu.rows(*[rng.randrange(2, 30) for _ in range(crowd)]))
        return set(launched) - known


if __name__ == "__main__":
    left = missing(sys.argv[1], int(sys.argv[2]))
    for one in sorted(left, key=str):
        print(one)
    print("missing" if left else "covered")
