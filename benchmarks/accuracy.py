"""What 8-bit weights and an 8-bit KV cache do to a model's answers, against bfloat16 on the same device.

    python benchmarks/accuracy.py --model default --prompts 16 --tokens 64

For each precision: relative error of the logits ‖l - l0‖ / ‖l0‖ on the reference's own text (mean and worst position),
how often the likeliest token is the same there, and how much of a freely running greedy answer equals the reference's:
the share of its tokens before the first that differs. float32 is the control: what bfloat16 itself does. Ends in one
JSON line. On a CPU e4m3 weights are dequantized, so activations stay wide; on a GPU prompts also quantize those.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from tokenspeed.attention.interface import AttentionBatch, AttentionNeed
from tokenspeed.attention.select import select_backend
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.resolve import resolve_checkpoint
from tokenspeed.config.model import ModelConfig, read_model_config
from tokenspeed.distributed.mesh import SINGLE
from tokenspeed.kernels.registry import Need, select_ops
from tokenspeed.loader.fp8_weights import read_kv_scales
from tokenspeed.loader.load import load_model
from tokenspeed.models.registry import build_model
from tokenspeed.quantization.interface import Scheme
from tokenspeed.quantization.select import scheme_for
from tokenspeed.quantization.unquantized import Unquantized
from tokenspeed.runner.kv_pool import LayerPages
from tokenspeed.text.tokenizer import load_tokenizer

PAGE = 64
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three laws of motion were written by",
    "To bake bread you need flour,",
    "SELECT name, COUNT(*) FROM orders",
    "The quick brown fox",
    "In 1969, people first walked on",
    "A healthy breakfast could be",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "List of the planets of the solar system: Mercury,",
    "Dear Sir or Madam, I am writing to",
    "The sum of 12 and 30 is",
    "import numpy as np\n\nx = np.",
)


@dataclass(frozen=True, slots=True)
class Precision:
    """One row of the table. `weights` float32 and bfloat16 are the dtype of activations too."""

    name: str
    dtype: torch.dtype
    weights: Literal["dense", "fp8"]
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one precision against the reference; shares are from 0 to 1."""

    precision: str
    logit_error_mean: float
    logit_error_max: float
    same_top_1: float
    same_greedy_tokens: float
    identical_answers: int


BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
REFERENCE = Precision("bf16", BF16, "dense", BF16)
OTHERS = (
    Precision("float32 (control)", F32, "dense", F32),
    Precision("fp8 weights", BF16, "fp8", BF16),
    Precision("fp8 KV", BF16, "dense", E4M3),
    Precision("fp8 weights and KV", BF16, "fp8", E4M3),
)


class Runner:
    """A model with room for `num_requests` sequences of `max_len` tokens."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        precision: Precision,
        num_requests: int,
        max_len: int,
    ) -> None:
        kv_dtype = None if precision.kv_dtype == precision.dtype else precision.kv_dtype
        ops, _ = select_ops(Need(device, precision.dtype, kv_dtype))
        need = AttentionNeed(device.type, precision.dtype, config.num_heads, config.num_kv_heads, config.head_dim, PAGE)
        backend, _ = select_backend(need, "auto", ops)
        scheme: Scheme = Unquantized(ops, "for comparison")
        if precision.weights == "fp8" or config.quantization is not None:
            scheme = scheme_for(config, ops, "fp8")
        self._model = build_model(config, SINGLE, scheme, ops, backend)
        load_model(self._model, checkpoint, config, progress=False)
        self._width = -(-max_len // PAGE)
        shape = (num_requests * self._width, PAGE, config.num_kv_heads, config.head_dim)
        scales = [(1.0, 1.0)] * config.num_layers
        if precision.kv_dtype == E4M3:
            scales = read_kv_scales(checkpoint, config.num_layers)

        def pages() -> torch.Tensor:
            return torch.zeros(shape, device=device).to(precision.kv_dtype)

        self._model.bind_kv([LayerPages(pages(), pages(), k_scale, v_scale) for k_scale, v_scale in scales])
        self._device = device

    def step(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Compute tokens of some requests, (request, first position, tokens) each -> float32 logits [tokens, V]."""
        lens = [len(tokens) for _, _, tokens in rows]
        ends = [start + len(tokens) for _, start, tokens in rows]
        positions = [start + i for _, start, tokens in rows for i in range(len(tokens))]
        slots = [
            request * self._width * PAGE + start + i for request, start, tokens in rows for i in range(len(tokens))
        ]
        table = [[request * self._width + page for page in range(self._width)] for request, _, _ in rows]
        starts = [0]
        for length in lens:
            starts.append(starts[-1] + length)
        batch = AttentionBatch(
            query_start=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(ends, torch.int32),
            page_table=self._tensor(table, torch.int32),
            slots=self._tensor(slots),
            num_requests=len(rows),
            num_tokens=starts[-1],
            query_lens_host=lens,
            seq_lens_host=ends,
        )
        token_ids = self._tensor([token for _, _, tokens in rows for token in tokens])
        hidden = self._model.forward(token_ids, self._tensor(positions), batch)
        return list(torch.split(self._model.logits(hidden), lens))

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """All prompts together: answers of `num_tokens` tokens."""
        logits = [self.step([(request, 0, prompt)])[0] for request, prompt in enumerate(prompts)]
        answers = [[int(scores[-1].argmax())] for scores in logits]
        for _ in range(num_tokens - 1):
            rows = [
                (request, len(prompt) + len(answers[request]) - 1, answers[request][-1:])
                for request, prompt in enumerate(prompts)
            ]
            for answer, scores in zip(answers, self.step(rows), strict=True):
                answer.append(int(scores[-1].argmax()))
        return answers

    def scores(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Logits that the answer's tokens were chosen by, [len(answer), V], on the CPU."""
        return self.step([(0, 0, prompt + answer[:-1])])[0][len(prompt) - 1 :].cpu()

    def _tensor(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def compare(
    runner: Runner, name: str, prompts: list[list[int]], answers: list[list[int]], reference: list[torch.Tensor]
) -> Row:
    """One precision against the reference's answers and logits."""
    errors, same = [], []
    for prompt, answer, expected in zip(prompts, answers, reference, strict=True):
        got = runner.scores(prompt, answer)
        errors.append((got - expected).norm(dim=1) / expected.norm(dim=1))
        same.append(got.argmax(1) == expected.argmax(1))
    free = runner.greedy(prompts, len(answers[0]))
    shared = [shared_start(answer, other) for answer, other in zip(answers, free, strict=True)]
    error = torch.cat(errors)
    return Row(
        precision=name,
        logit_error_mean=float(error.mean()),
        logit_error_max=float(error.max()),
        same_top_1=float(torch.cat(same).float().mean()),
        same_greedy_tokens=sum(shared) / sum(len(answer) for answer in answers),
        identical_answers=sum(count == len(answer) for count, answer in zip(shared, answers, strict=True)),
    )


def shared_start(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def report(rows: list[Row], num_prompts: int) -> None:
    """The table."""
    print(f"{'against bf16':<22}{'logit error':>12}{'worst':>9}{'same top 1':>12}{'same greedy':>13}{'identical':>11}")
    for row in rows:
        print(
            f"{row.precision:<22}{row.logit_error_mean:>12.4f}{row.logit_error_max:>9.4f}{row.same_top_1:>11.1%} "
            f"{row.same_greedy_tokens:>12.1%}{row.identical_answers:>7} / {num_prompts}"
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="a folder, a .gguf file, a hub id, or `default`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"how many, at most {len(PROMPTS)}")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    args = parser.parse_args()
    if not (1 <= args.prompts <= len(PROMPTS) and args.tokens >= 1):
        parser.error(f"--prompts takes 1 to {len(PROMPTS)}, --tokens at least 1")
    device = torch.device(args.device)
    checkpoint = resolve_checkpoint(args.model)
    config = read_model_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint, config)
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS[: args.prompts]]
    room = (len(prompts), max(map(len, prompts)) + args.tokens)
    started = time.perf_counter()
    first = Runner(checkpoint, config, device, REFERENCE, *room)
    answers = first.greedy(prompts, args.tokens)
    reference = [first.scores(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    del first
    rows = []
    for precision in OTHERS:
        runner = Runner(checkpoint, config, device, precision, *room)
        rows.append(compare(runner, precision.name, prompts, answers, reference))
        del runner
    report(rows, len(prompts))
    seconds = round(time.perf_counter() - started, 1)
    about = {"benchmark": "accuracy", "model": args.model, "device": str(device), "torch": torch.__version__}
    print(json.dumps({**about, "tokens": args.tokens, "rows": [asdict(row) for row in rows], "seconds": seconds}))


if __name__ == "__main__":
    main()
