"""Tools of the laws: tiny random models on disk, and the real engine (loop, scheduler, runner) over them.

An engine here is what `LLM` starts, without text: `EngineThread` with `build_runner`, spoken to over its channel.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.args import EngineArgs
from tokenspeed.config.device import read_device_info
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import read_model_config
from tokenspeed.config.resolve import resolve
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.engine.launch import EngineThread
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineStats,
    Logprobs,
    Outputs,
    Ready,
    Reply,
    SequenceOutput,
)
from tokenspeed.quantization.select import scheme_for
from tokenspeed.runner.build import build_runner
from tokenspeed.runner.interface import Runner

VOCAB = 128
CONTEXT = 128
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
}


def write_model(folder: Path, family: str, dtype: str = "float32") -> str:
    """A random model whose best tokens stand out clearly, so that rounding of sums in another order changes nothing."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps({**shape, **FAMILIES[family]}))
    config = read_model_config(resolve_checkpoint(str(folder), load_format="dummy"))
    ops, _ = select_ops(Need(torch.device("cpu"), torch.float32), only="reference")
    scheme = scheme_for(config, ops)
    moe = None
    if config.moe is not None:
        moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
    model = build_model(config, SINGLE, scheme, ops, PagedAttentionBackend(ops), moe)
    generator = torch.Generator().manual_seed(17)
    tensors = {}
    for name, wanted in model.expected_shapes().items():
        drawn = torch.randn(wanted, generator=generator)
        tensors[name] = ((1 + drawn * 0.1) if "norm" in name else drawn * 0.3).to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the laws are put to the test."""


def engine_config(model: str, *, device: str = DEVICE, **options: Any) -> EngineConfig:
    """As `LLM(model, **options)` would resolve it; by default everything that the laws turn on and off is off."""
    plain = {
        "dtype": "float32",
        "device": device,
        **({"num_threads": 1} if device == "cpu" else {"enforce_eager": True}),
        "seed": 1,
        "prefix_granularity": 4,
        "max_total_tokens": 1024,
        "enable_prefix_caching": False,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 512,
    }
    args = EngineArgs(model=model, **(plain | options))
    checkpoint = resolve_checkpoint(model)
    config, _ = resolve(args, checkpoint, read_model_config(checkpoint), read_device_info())
    return config


@dataclass
class Text:
    """What one sequence became."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "news of a sequence that has ended"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason


@dataclass
class Run:
    """What an engine said: each sequence by (request id, index), and its statistics since it started."""

    texts: dict[tuple[str, int], Text]
    stats: EngineStats  # with every step of the run in step_tokens

    def tokens(self) -> dict[tuple[str, int], tuple[list[int], str | None]]:
        """Token ids and finish reason of each sequence: what the laws say is the same."""
        return {key: (text.token_ids, text.finish_reason) for key, text in self.texts.items()}


class Engine:
    """A running engine. Use it in a `with` block."""

    def __init__(self, config: EngineConfig) -> None:
        self._may_start = threading.Event()
        self._engine = EngineThread(config, self._build)
        self.report: list[str] = []

    def _build(self, config: EngineConfig) -> Runner:
        """Waits for the first requests, so that the loop finds them all at once."""
        self._may_start.wait()
        return build_runner(config)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._may_start.set()
        self._engine.stop()

    def run(
        self, requests: list[AddRequest], on_output: Callable[[SequenceOutput], list[AbortRequest]] | None = None
    ) -> Run:
        """Send all requests and wait for every sequence to end; then the invariants must hold.

        Args:
            on_output: is shown each piece of news and says whom to abort.
        """
        channel = self._engine.channel
        texts = {(request.request_id, index): Text() for request in requests for index in range(request.sampling.n)}
        step_tokens: list[int] = []
        for request in requests:
            channel.send(request)
        self._may_start.set()
        while any(text.finish_reason is None for text in texts.values()):
            for message in channel.receive(30):
                match message:
                    case Ready():
                        self.report = message.report
                    case EngineStats():
                        step_tokens += message.step_tokens
                    case Outputs():
                        for output in message.sequences:
                            texts[output.request_id, output.index].take(output)
                            for abort in on_output(output) if on_output is not None else []:
                                channel.send(abort)
                    case _:
                        raise AssertionError(message)
        assert self._ask("check", step_tokens).ok
        stats = self._ask("stats", step_tokens).stats
        assert stats is not None and stats.num_pages_used == 0
        stats.step_tokens = step_tokens + stats.step_tokens
        return Run(texts, stats)

    def _ask(self, name: Literal["check", "stats"], step_tokens: list[int]) -> Reply:
        self._engine.channel.send(Command(1, name))
        while True:
            for message in self._engine.channel.receive(30):
                if isinstance(message, EngineStats):
                    step_tokens += message.step_tokens
                elif isinstance(message, Reply):
                    return message


def run(config: EngineConfig, requests: list[AddRequest]) -> Run:
    """One engine for one list of requests."""
    with Engine(config) as engine:
        return engine.run(requests)
