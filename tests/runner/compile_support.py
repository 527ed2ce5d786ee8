"""The configuration that tests of compile workers start from."""

from __future__ import annotations

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import Choice, EngineConfig
from tokenspeed.config.gpu_choices import capture_ladder
from tokenspeed.models.registry import examples

CONFIG = EngineConfig(
    model=next(example for example in examples() if example.architecture == "LlamaForCausalLM"),
    checkpoint=Checkpoint(name="x", format="safetensors", config_path="/x", weight_files=("/w",), tokenizer_path="/x"),
    load_format="safetensors",
    device="cuda",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    max_model_len=4096,
    max_num_seqs=160,
    max_num_batched_tokens=8192,
    page_size=64,
    num_pages=None,
    kv_memory_bytes=None,
    enable_prefix_caching=True,
    enable_overlap=True,
    enforce_eager=False,
    schedule_policy="fifo",
    attention_backend="auto",
    num_threads=3,
    seed=5,
    max_queue_len=5,
    gpu_memory_utilization=0.88,
    capture_sizes=capture_ladder(160),
    choices=(Choice("--seed", "5", "drawn"),),
)
