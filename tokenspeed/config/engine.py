"""The resolved configuration: frozen, complete, and every automatic choice with its reason. Built by `resolve`."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.model import ModelConfig


class Choice(msgspec.Struct, frozen=True):
    """One automatic choice: flag name, chosen value, and why."""

    name: str
    value: str
    reason: str


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process runs with. It crosses the process border as msgspec MessagePack.

    Fields (lengths in tokens):
        checkpoint: where weights and tokenizer lie (`--tokenizer` has already replaced its tokenizer_path).
        load_format: safetensors, gguf or dummy.
        device: cpu or cuda. dtype: activations. kv_cache_dtype: KV cache.
        page_size: tokens a page.
        num_pages: pages of the KV pool, or None = what kv_memory_bytes holds; both None on a GPU = what is left there.
        max_num_batched_tokens: the token budget of one step (`--chunked-prefill-size`).
        num_threads: CPU threads of the runner; with a GPU, processes that compile kernels at start.
        gpu_memory_utilization: share of the GPU's memory that the engine may use; None on a CPU.
        capture_sizes: decode batch sizes recorded as CUDA graphs, ascending; empty on a CPU and when eager.
        prefill_sizes: token counts of small prompt steps recorded as CUDA graphs, ascending; empty likewise.
        pad_graphs: a batch between two of these sizes is padded to the next one.
        skip_tokenizer_init: the client works in token ids only.
        quantize_on_load: what a dense checkpoint is quantized to; None = weights stay as they are stored.
        has_e4m3: the GPU's kernels take 8-bit floats.
        grammar_backend: library of structured output; auto: the engine takes what is installed.
        grammar_timeout_s: seconds that compiling one grammar may take.
        any_whitespace: structured JSON may be laid out freely.
        decode_log_interval: decode steps from one `Decode batch.` line of the log to the next.
        choices: automatic choices with reasons.
    """

    model: ModelConfig
    checkpoint: Checkpoint
    load_format: Literal["safetensors", "gguf", "dummy"]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8_e4m3"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int | None
    kv_memory_bytes: int | None
    enable_prefix_caching: bool
    enable_overlap: bool
    enforce_eager: bool
    schedule_policy: Literal["fifo", "priority"]
    attention_backend: str
    num_threads: int
    seed: int
    max_queue_len: int
    moe_backend: str = "auto"
    gpu_memory_utilization: float | None = None
    capture_sizes: tuple[int, ...] = ()
    prefill_sizes: tuple[int, ...] = ()
    pad_graphs: bool = True
    quantize_on_load: Literal["fp8"] | None = None
    has_e4m3: bool = True
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    grammar_backend: Literal["auto", "xgrammar", "llguidance", "none"] = "auto"
    grammar_timeout_s: float = 30.0
    any_whitespace: bool = True
    decode_log_interval: int = 40
    choices: tuple[Choice, ...] = ()
