"""Tools of the laws of served precisions: small bfloat16 models that the fused kernels take, and how near two runs are.

Every expert of a mixture is chosen for every token: between two experts of nearly equal score a rounding decides, and
then two correct engines differ by a whole expert. Which experts are chosen is compared in float32 (test_device_laws).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from law_engine import FAMILIES, Run, Text
from safetensors.torch import save_file

from tokenspeed.attention.paged import PagedAttentionBackend
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import read_model_config
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.models.registry import build_model
from tokenspeed.moe.select import moe_need, select_moe
from tokenspeed.protocol.messages import AddRequest, Logprobs
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.quantization.select import scheme_for

VOCAB = 512
CONTEXT = 1024
TOP = 20
"""Best tokens whose logprobs are compared at every position, the most that can be asked for."""
_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
"""Widths are multiples of 64 (fused linears) and 128 (blocks of e4m3 scales), heads of 64: what the fast paths take."""
_GPT_OSS = {
    "intermediate_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "sliding_window": 32,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "gpt_oss": _GPT_OSS,
    "gpt_oss_mxfp4": _GPT_OSS
    | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}},
}
SERVED = tuple(_OWN)


def write_served(folder: Path, family: str) -> str:
    """A random model: matrices keep the size of what they are given, the head spreads logits to a deviation of 3."""
    published = FAMILIES[family.removesuffix("_mxfp4")]
    (folder / "config.json").write_text(json.dumps({**published, **_SHAPE, **_OWN[family]}))
    config = read_model_config(resolve_checkpoint(str(folder), load_format="dummy"))
    ops, _ = select_ops(Need(torch.device("cpu"), torch.float32), only="reference")
    scheme = scheme_for(config, ops)
    moe = None
    if config.moe is not None:
        moe, _ = select_moe(moe_need(config, SINGLE, scheme.expert_format, ops), "auto", ops)
    model = build_model(config, SINGLE, scheme, ops, PagedAttentionBackend(ops), moe)
    generator = torch.Generator().manual_seed(29)
    tensors = {name: _drawn(name, shape, generator) for name, shape in model.expected_shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if name.endswith("_scales"):
        # Codes have a mean square of 8.56: times 2**-6 that is a deviation of 0.05, near 256 ** -0.5.
        return torch.full(shape, 127 - 6, dtype=torch.uint8)
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        values = 1 + values * 0.1
    elif "embed_tokens" in name:
        pass
    elif len(shape) > 1:
        # GPT-OSS keeps experts as [E, in, out], all else is [out, in].
        fan_in = shape[1] if len(shape) == 3 else shape[-1]
        values *= (3 if "lm_head" in name else 1) * fan_in**-0.5
    else:
        values *= 0.1
    return values.to(torch.bfloat16)


def requests(logprobs: bool, lengths: tuple[int, ...], max_tokens: int) -> list[AddRequest]:
    """Greedy ones. With `logprobs` those of every token and of every second prompt."""
    rng = random.Random(str(lengths))
    made = []
    for number, length in enumerate(lengths):
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=TOP if logprobs else None,
            prompt_logprobs=TOP if logprobs and number % 2 else None,
        )
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        made.append(AddRequest(request_id=f"{length}-{number}", prompt_token_ids=prompt, sampling=sampling))
    return made


SHORT = (1, 5, 16, 17, 33, 64, 65, 90)
"""Prompt lengths around page borders."""
LONG = (600, 600)
"""Whole prompts that a GPU attends to with torch's own attention when they have a step of their own."""


@dataclass
class Nearness:
    """How far a run is from another.

    Fields:
        error: norm of the difference of logprobs over the norm of the logprobs, all compared positions together.
        worst: the same of the worst position.
        size: root of the mean square of the other's compared logprobs.
        num_compared, num_wanted: output tokens before the first difference of each sequence, and all.
        gap: the largest lead that the other's token had over ours where a sequence first differs, in logprob.
    """

    error: float
    worst: float
    size: float
    num_compared: int
    num_wanted: int
    gap: float


def nearness(ours: Run, theirs: Run) -> Nearness:
    """Compare logprobs of positions with the same context: prompts, and outputs up to the first token that differs.

    Runs without logprobs have errors of 0.
    """
    pairs: list[tuple[Logprobs, Logprobs]] = []
    compared = wanted = 0
    gap = 0.0
    for key, text in theirs.texts.items():
        mine = ours.texts[key]
        assert mine.finish_reason == text.finish_reason and len(mine.token_ids) == len(text.token_ids), key
        same = shared_prefix(mine, text)
        compared, wanted = compared + same, wanted + len(text.token_ids)
        if same < len(text.token_ids):
            gap = max(gap, lead(text.logprobs[same], mine.token_ids[same]))
        pairs += zip(mine.prompt_logprobs, text.prompt_logprobs, strict=False)
        pairs += zip(mine.logprobs[: same + 1], text.logprobs[: same + 1], strict=False)
    parts = [differences(*pair) for pair in pairs]
    squares = [(sum(d * d for d, _ in part), sum(b * b for _, b in part), len(part)) for part in parts]
    off, size, count = (sum(column) for column in zip(*squares, strict=True)) if squares else (0.0, 1.0, 1)
    mean = size / count
    worst = max(((d / n / mean) ** 0.5 for d, _, n in squares), default=0.0)
    return Nearness((off / size) ** 0.5, worst, mean**0.5, compared, wanted, gap)


def shared_prefix(ours: Text, theirs: Text) -> int:
    """Output tokens before the first that differs."""
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(theirs.token_ids))


def lead(best: Logprobs, other: int) -> float:
    """How much likelier the chosen token was than another; at least the distance to the last one known."""
    known = dict(zip(best.top_ids, best.top_logprobs, strict=True))
    return best.logprob - known.get(other, min(best.top_logprobs))


def differences(ours: Logprobs, theirs: Logprobs) -> list[tuple[float, float]]:
    """(difference, their logprob) of each of their best tokens. One that is not among our best had less than those."""
    known = dict(zip(ours.top_ids, ours.top_logprobs, strict=True))
    floor = min(ours.top_logprobs)
    found = []
    for token, logprob in zip(theirs.top_ids, theirs.top_logprobs, strict=True):
        mine = known.get(token, min(floor, logprob))
        found.append((mine - logprob, logprob))
    return found
