"""An engine that emits given token sequences: tokens are bytes and every format's special marks, and what becomes of
them is the client's own text path (detokenizer, stop strings). Prompts are given, too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fake_engine_client import EOS, SPECIAL, ByteTokenizer, FakeClient

from tokenspeed.engine.interface import GenerationEvent, GenerationRequest
from tokenspeed.engine.sequence import SequenceStream, TokenTexts
from tokenspeed.protocol.messages import Logprobs, SequenceOutput
from tokenspeed.text.detokenizer import Detokenizer

MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
FIRST_MARK = 300
VOCAB_SIZE = FIRST_MARK + len(MARKS)


class MarkTokenizer(ByteTokenizer):
    """Bytes, the special tokens of `ByteTokenizer`, and MARKS."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.spelled = {**SPECIAL, **{FIRST_MARK + place: mark for place, mark in enumerate(MARKS)}}
        self.ids = {spelling: token_id for token_id, spelling in self.spelled.items()}
        self.special_ids = frozenset(self.spelled)
        self._pattern = re.compile("(" + "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))) + ")")

    def token_to_id(self, spelling: str) -> int | None:
        return self.ids.get(spelling)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        pieces = self._pattern.split(text) if parse_special else [text]
        return [
            token_id
            for piece in pieces
            for token_id in ([self.ids[piece]] if parse_special and piece in self.ids else piece.encode())
        ]

    def token_bytes(self, token_id: int) -> bytes:
        return self.spelled[token_id].encode() if token_id in self.spelled else bytes([token_id])


class ScriptedClient(FakeClient):
    """`reply` is what the model writes, marks spelled out.

    Knobs:
        prompt: what every conversation renders to.
        ending: how a sequence ends that max_tokens does not cut.
    """

    def __init__(self, reply: Any = "", prompt: str = "<|im_start|>assistant\n", **model: Any) -> None:
        super().__init__(reply, vocab_size=VOCAB_SIZE, **model)
        self.tokenizer = MarkTokenizer()
        self.max_model_len = 100_000
        self.prompt = prompt
        self.ending = "stop"

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        super().render_chat(messages, **options)
        return self.tokenizer.encode(self.prompt, False, True)

    def _check(self, request: GenerationRequest) -> None:
        if self.refuse is not None:
            raise self.refuse

    def _sequence(self, request: GenerationRequest, index: int) -> list[GenerationEvent]:
        sampling = request.sampling
        stream = SequenceStream(
            index,
            sampling,
            len(request.prompt_token_ids),
            (EOS,),
            Detokenizer(self.tokenizer, sampling.skip_special_tokens, continues=True),
            TokenTexts(self.tokenizer),
        )
        events: list[GenerationEvent] = []
        for output in self._outputs(request, index):
            events.append(stream.feed(output))
            if stream.is_finished:
                break
        return events

    def _outputs(self, request: GenerationRequest, index: int) -> Iterable[SequenceOutput]:
        sampling = request.sampling
        text = self.reply if isinstance(self.reply, str) else self.reply(request, index)
        ids = self.tokenizer.encode(text, False, True) + ([EOS] if self.ending == "stop" else [])
        reason, limit = self.ending, sampling.max_tokens
        for place, token_id in enumerate(ids):
            if token_id in sampling.stop_token_ids:
                ids, reason = ids[: place + 1], "stop"
                break
        if limit is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        stop_id = ids[-1] if reason == "stop" else None
        for start in range(0, max(1, len(ids)), self.chunk):
            part = ids[start : start + self.chunk]
            is_last = start + self.chunk >= len(ids)
            logprobs = [Logprobs(token_id, -0.5, 1, [], []) for token_id in part]
            yield SequenceOutput(
                request_id=request.request_id,
                index=index,
                token_ids=part,
                logprobs=logprobs if sampling.logprobs is not None else [],
                finish_reason=reason if is_last else None,  # type: ignore[arg-type]
                stop_token_id=stop_id if is_last else None,
            )
