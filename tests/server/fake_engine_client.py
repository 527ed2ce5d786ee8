"""An `EngineClient` with a script instead of an engine. Tokens are bytes, so that texts and ids are easy to read."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

from tokenspeed.config.model import ModelConfig, RopeConfig
from tokenspeed.engine.admission import check_fits, check_request
from tokenspeed.engine.interface import GenerationEvent, GenerationRequest, LogprobEntry
from tokenspeed.grammar.select import KINDS
from tokenspeed.protocol.errors import EngineDead, InvalidRequest, Overloaded
from tokenspeed.protocol.messages import CommandName, EngineStats, KVGroup, ProfileOptions

BOS, EOS, IM_START = 256, 257, 258
SPECIAL = {BOS: "<bos>", EOS: "<eos>", IM_START: "<|im_start|>"}
VOCAB_SIZE = 300


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; three special tokens follow."""

    vocab_size = VOCAB_SIZE
    special_ids = frozenset(SPECIAL)
    strips_leading_space = False

    def token_to_id(self, spelling: str) -> int | None:
        return next((token_id for token_id, known in SPECIAL.items() if known == spelling), None)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        pieces: list[int] = [BOS] if add_special_tokens else []
        while parse_special and "<|im_start|>" in text:
            before, _, text = text.partition("<|im_start|>")
            pieces += [*before.encode(), IM_START]
        return pieces + list(text.encode())

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [token for token in token_ids if token < 256 or not skip_special_tokens]
        return b"".join(self.token_bytes(token) for token in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIAL.get(token_id, f"<{token_id}>").encode()


def model_config(**changes: Any) -> ModelConfig:
    """A small model's shape; only what the server reads matters."""
    shape: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position": 256,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "bos_token_id": BOS,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**{**shape, **changes})


class FakeClient:
    """Answers every request with `reply`, a token a byte, then the end-of-sequence token.

    Knobs:
        reply: text, or a function of (request, index).
        chunk: tokens an event. delay_s: before each event. gate: when set, waited for before each event but the first.
        refuse: raised before the first event. fail_after: events after which each sequence ends in an error (its code:
        fail_code).
        vanish_after: events after which the stream just ends. boom_after: events after which the iterator raises.
    """

    def __init__(self, reply: str | Callable[[GenerationRequest, int], str] = "hello", **model: Any) -> None:
        self.model_config = model_config(**model)
        self.max_model_len = 256
        self.tokenizer = ByteTokenizer()
        self.template_text = ""
        self.template_variables: frozenset[str] = frozenset()
        self.grammar_kinds = frozenset(KINDS["xgrammar"])
        self.kv_capacity_tokens = 900
        self.kv_groups = [KVGroup(name="full", window=None, sequence_pages=4, kept_tokens=900)]
        self.reply = reply
        self.chunk = 1
        self.delay_s = 0.0
        self.gate: asyncio.Event | None = None
        self.refuse: Exception | None = None
        self.fail_after: int | None = None
        self.fail_code: str | None = None
        self.vanish_after: int | None = None
        self.boom_after: int | None = None
        self.requests: list[GenerationRequest] = []
        self.rendered: list[dict[str, Any]] = []
        self.running: set[str] = set()
        self.closed_early: list[str] = []
        self.commands: list[str] = []
        self.profile: ProfileOptions | None = None
        self.command_result: tuple[bool, str | None] = (True, None)
        self.is_alive = True
        self.is_draining = False
        self.stats: EngineStats | None = None
        self.end_error: str | None = None

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        self.rendered.append(
            {
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template": chat_template,
                "template_kwargs": template_kwargs,
            }
        )
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        if "raise in template" in text:
            raise InvalidRequest("the chat template says no", param="messages")
        if "crash in template" in text:
            raise RuntimeError("tokenizer failure")
        if must_fit:
            check_fits(self.tokenizer, text, self.max_model_len)
        return [IM_START, *text.encode(), *([IM_START] if add_generation_prompt else [])]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self._check(request)
        self.running.add(request.request_id)
        sequences = [self._sequence(request, index) for index in range(request.sampling.n)]
        num_events = 0
        finished = 0
        try:
            while finished < len(sequences):
                for events in sequences:
                    if not events:
                        continue
                    await self._pause(num_events)
                    event = events.pop(0)
                    if event.finish_reason is None and num_events == self.fail_after:
                        event = GenerationEvent(
                            event.index, finish_reason="error", error="NaN logits", error_code=self.fail_code
                        )
                    if num_events == self.vanish_after:
                        return
                    if num_events == self.boom_after:
                        raise RuntimeError("a bug in the client")
                    if self.end_error is not None:
                        event = GenerationEvent(event.index, finish_reason="error", error=self.end_error)
                    num_events += 1
                    finished += event.finish_reason is not None
                    yield event
        finally:
            self.running.discard(request.request_id)
            if finished < len(sequences):
                self.closed_early.append(request.request_id)

    def _check(self, request: GenerationRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        if not self.is_alive:
            raise EngineDead("the engine is gone")
        if self.is_draining:
            raise Overloaded("draining", 5, draining=True)
        check_request(request, VOCAB_SIZE, self.max_model_len)

    async def _pause(self, num_events: int) -> None:
        if self.gate is not None and num_events > 0:
            await self.gate.wait()
        await asyncio.sleep(self.delay_s)

    def _sequence(self, request: GenerationRequest, index: int) -> list[GenerationEvent]:
        sampling = request.sampling
        text = self.reply if isinstance(self.reply, str) else self.reply(request, index)
        ids = [*text.encode(), EOS]
        reason: Literal["stop", "length"] = "stop"
        stop: str | None = None
        for word in sampling.stop:
            if word in text:
                ids, stop = list((text.partition(word)[0]).encode()), word
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        if len(ids) > limit:
            ids, reason, stop = ids[:limit], "length", None
        events = []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a client never gives part of a character
        for start in range(0, max(1, len(ids)), self.chunk):
            new = ids[start : start + self.chunk]
            events.append(
                GenerationEvent(
                    index,
                    text=decoder.decode(bytes(token for token in new if token < 256), start + len(new) >= len(ids)),
                    token_ids=new,
                    logprobs=self._entries(new, sampling.logprobs),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=2 + 5 * index,  # siblings find what the first computed
                    num_output_tokens=start + len(new),
                )
            )
        if index == 0:
            events[0].prompt_logprobs = self._entries(request.prompt_token_ids[1:], sampling.prompt_logprobs)
        events[-1].finish_reason, events[-1].stop_reason = reason, stop
        return events

    def _entries(self, ids: list[int], num_top: int | None) -> list[LogprobEntry]:
        if num_top is None:
            return []
        return [
            LogprobEntry(
                token_id=token,
                token=self.tokenizer.token_bytes(token).decode(errors="replace"),
                token_bytes=self.tokenizer.token_bytes(token),
                logprob=-0.5,
                rank=1,
                top=[self._alternative((token + k) % 256, k) for k in range(num_top)],
            )
            for token in ids
        ]

    def _alternative(self, token: int, k: int) -> LogprobEntry:
        spelled = self.tokenizer.token_bytes(token)
        logprob = -0.5 - k if k < 3 else float("-inf")
        return LogprobEntry(token, spelled.decode(errors="replace"), spelled, logprob, k + 1)

    def abort(self, request_id: str) -> None:
        self.closed_early.append(request_id)

    async def command(
        self, name: CommandName, timeout_s: float = 20.0, profile: ProfileOptions | None = None
    ) -> tuple[bool, str | None]:
        self.commands.append(name)
        self.profile = profile
        return self.command_result

    async def drain(self, timeout_s: float) -> None:
        self.is_draining = True
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.005)
        self.end_error = "the server is shutting down"
        if self.gate is not None:
            self.gate.set()

    async def close(self) -> None:
        self.is_alive = False
