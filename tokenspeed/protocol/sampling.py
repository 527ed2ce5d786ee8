"""How one request wants its tokens chosen. Validated once, here; inside the engine an invalid value cannot exist."""

from __future__ import annotations

import math

import msgspec

from tokenspeed.protocol.errors import Field, InvalidRequest

MAX_LOGPROBS = 20  # OpenAI's limit for chat `top_logprobs`
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: less would leave the range of float32


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """A bound on the reasoning with which an output begins.

    Fields:
        num_tokens: output tokens after which the reasoning is closed, unless it has ended by itself.
        ends: the token ids that end it.
        closing: the ids that are written to close it; their end is `ends`.
        over_at: an id at which it is over, too, whatever comes behind it.
    """

    num_tokens: int
    ends: tuple[int, ...]
    closing: tuple[int, ...]
    over_at: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters with the field's standard names.

    Fields:
        n: sequences to generate from the one prompt, 1..128. Sequence i uses seed + i.
        max_tokens: output tokens at most; None = up to the context length.
        min_tokens: no end-of-sequence, stop token or stop string before this many output tokens.
        temperature: 0 = greedy (argmax). Below 1e-6 counts as 0.
        top_p: nucleus mass in (0, 1].
        top_k: 0 or -1 = off; any size up to the vocabulary otherwise.
        min_p: drop tokens below min_p * p(best), in [0, 1].
        presence_penalty, frequency_penalty: in [-2, 2], over output tokens (OpenAI's definition).
        repetition_penalty: in [0.01, 2], 1 = off, over prompt and output tokens (CTRL, arXiv 1909.05858, section 4.1).
        logit_bias: token id -> bias in [-100, 100], added to the logits before everything else.
        seed: same seed, same random number at each position, whatever the batch; so the same text where the logits
            are the same. A cached prefix, chunks and a preemption may round them otherwise in bfloat16 (decision 003).
            None = drawn by the engine.
        stop: strings that end the text; matched across token boundaries by the client (`text/`).
        stop_token_ids: token ids that end the sequence, besides the model's end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids (stop_token_ids still stop).
        logprobs: None = none; k = logprob of the sampled token and of the k best alternatives.
        prompt_logprobs: the same for each prompt token but the first.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        thinking: a bound on the reasoning, for an output that begins inside it. The server makes it.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        _within("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, None)
        _within("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                [
                    f"min_tokens is {self.min_tokens}, above ",
                    Field("max_tokens"),
                    f" {self.max_tokens}; lower one or raise the other",
                ],
                param="min_tokens",
            )
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, it must be above 0 and at most 1; 1 turns it off", param="top_p")
        _within("top_k", self.top_k, -1, None)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        for token_id, bias in self.logit_bias.items():
            _within("logit_bias", bias, -100.0, 100.0)
            _within("logit_bias", token_id, 0, None)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequest(
                [Field("stop"), " holds an empty string, which would end every text at once"], param="stop"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _within(name, value, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        """True when the next token is the argmax of the (biased, penalised) logits."""
        return self.temperature < 1e-6 or self.top_k == 1


def _within(name: str, value: float, low: float | None, high: float | None) -> None:
    finite = math.isfinite(value)
    if finite and (low is None or value >= low) and (high is None or value <= high):
        return
    limit = f"at least {low}" if high is None else f"between {low} and {high}"
    raise InvalidRequest([Field(name), f" is {value}, it must be {limit}"], param=name)
