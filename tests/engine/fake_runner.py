"""A runner without a device: the next token is a hash of the slot's history. No torch, faults on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tokenspeed.cache.spec import GroupSpec
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.config.rope import RopeConfig
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.protocol.step import Admission, Row, RowResult, StepPlan, StepResult, TokenLogprobs, results_of
from tokenspeed.text.chat_template import ChatTemplate

VOCAB = 300
EOS = 299
NAN_TOKEN = 298  # a prompt that holds it fails alone
PAGE_SIZE = 4
TEMPLATE = ChatTemplate(
    {"default": "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"},
    special_tokens={},
    spellings=(),
)


def engine_config(
    *, num_pages: int = 64, max_num_seqs: int = 4, max_model_len: int = 128, overlap: bool = True, budget: int = 16
) -> EngineConfig:
    """A configuration for the fake runner."""
    model = ModelConfig(
        architecture="Fake",
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=VOCAB,
        max_position=max_model_len,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        eos_token_ids=(EOS,),
    )
    return EngineConfig(
        model=model,
        checkpoint=Checkpoint(name="fake", format="config", config_path="-", weight_files=(), tokenizer_path="-"),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        kv_memory_bytes=None,
        enable_prefix_caching=True,
        enable_overlap=overlap,
        enforce_eager=True,
        schedule_policy="fifo",
        attention_backend="auto",
        num_threads=1,
        seed=0,
        max_queue_len=64,
    )


def next_token(history: list[int]) -> int:
    """The fake model: letters of ASCII mostly, so that the byte tokenizer reads them as text."""
    mixed = 17
    for token_id in history:
        mixed = (mixed * 1_000_003 + token_id + 1) % (2**61 - 1)
    return 97 + mixed % 26


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the fake model says after a prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class FakeRunner:
    """See `runner.interface.Runner`.

    Args:
        step_s: seconds a step takes.
        before_step: called with the step's id on the runner's thread; may raise (the step fails) or wait.
    """

    def __init__(
        self, config: EngineConfig, step_s: float = 0.0, before_step: Callable[[int], None] | None = None
    ) -> None:
        assert config.num_pages is not None
        self.groups = [GroupSpec("full", "full", config.page_size, 1, config.num_pages)]
        self.report = ["fake runner: no device"]
        self.grammars: GrammarCompiler | None = None
        self.plans: list[StepPlan] = []
        self.is_closed = False
        self._slots: dict[int, Admission] = {}
        self._tokens: dict[int, list[int]] = {}
        self._step_s = step_s
        self._before_step = before_step
        self._thread = ThreadPoolExecutor(1)

    def capture(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        return self._thread.submit(self._step, plan)

    def close(self) -> None:
        self.is_closed = True
        self._thread.shutdown()

    def _step(self, plan: StepPlan) -> StepResult:
        if self._before_step is not None:
            self._before_step(plan.step_id)
        if self._step_s:
            time.sleep(self._step_s)
        for admission in plan.admissions:
            self._slots[admission.slot] = admission
            self._tokens[admission.slot] = list(admission.token_ids)
        return StepResult(plan.step_id, results_of(plan.rows, [self._row(row) for row in plan.rows]))

    def _row(self, row: Row) -> RowResult:
        tokens, sampling = self._tokens[row.slot], self._slots[row.slot].sampling
        if NAN_TOKEN in tokens:
            return RowResult(row.slot, [], error="the logits hold NaN")
        prompt_logprobs: list[TokenLogprobs] = []
        if sampling.prompt_logprobs is not None:
            end = min(row.start + row.num_tokens + 1, self._slots[row.slot].prompt_len)
            prompt_logprobs = [_logprob(tokens[position], sampling) for position in range(row.start + 1, end)]
        if not row.samples:
            return RowResult(row.slot, [], [], prompt_logprobs)
        token_id = next_token(tokens)
        tokens.append(token_id)
        logprobs = [_logprob(token_id, sampling)] if sampling.logprobs is not None else []
        return RowResult(row.slot, [token_id], logprobs, prompt_logprobs)


def _logprob(token_id: int, sampling: SamplingParams) -> TokenLogprobs:
    top = list(range(100, 100 + (sampling.logprobs or 0)))
    return TokenLogprobs(token_id, -0.5, 1, top, [-1.0] * len(top))


class ByteTokenizer:
    """Ids 0 to 255 are bytes; the rest are special and spell nothing when skipped."""

    vocab_size = VOCAB
    special_ids = frozenset(range(256, VOCAB))
    strips_leading_space = False

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id < 256).decode(
            "utf-8", "replace"
        )

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def encode_rendered(self, text: str, breaker: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()
