"""The client of one engine: requests in, events out, on an asyncio loop. Satisfies `interface.EngineClient`.

Owns the live requests: whatever happens (the engine dies, the consumer leaves, the detokenizer fails), each of their
sequences gets exactly one terminal event. May be added here: another message of the channel, another reason to end a
request. Not here: text (text/, `sequence.py`), limits (`admission.py`), processes (`launch.py`). No torch.

A thread of its own waits on the channel and hands messages to the loop; everything else runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenspeed.config.model import ModelConfig
from tokenspeed.engine.admission import Gate, check_fits, check_request
from tokenspeed.engine.events import EventQueue
from tokenspeed.engine.interface import GenerationEvent, GenerationRequest, TokenizerFace
from tokenspeed.engine.launch import LAST_WORDS_S, EngineHandle, describe_exit
from tokenspeed.engine.sequence import SequenceStream, TokenTexts
from tokenspeed.grammar.lanes import RETRY_S
from tokenspeed.protocol.errors import EngineDead, InvalidRequest, Overloaded
from tokenspeed.protocol.grammar import GRAMMARS_BUSY, INVALID_GRAMMAR, GrammarKind, GrammarSpec
from tokenspeed.protocol.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CommandName,
    EngineStats,
    Fatal,
    FinishReason,
    FromEngine,
    Outputs,
    ProfileOptions,
    Ready,
    Reply,
    SequenceOutput,
)
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.text.chat_template import ChatTemplate, render_chat_ids
from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.no_tokenizer import NO_TOKENIZER, NoTokenizer

logger = logging.getLogger(__name__)

DRAIN_RETRY_S = 5
SHUTDOWN_MESSAGE = "the server is shutting down; send the request again later"


@dataclass(slots=True)
class _Live:
    """A request between `generate` and the end of its iterator."""

    wire_id: str  # unique for ever, unlike the caller's id: late news of a request never reaches its namesake
    request: GenerationRequest
    streams: list[SequenceStream]
    events: EventQueue = field(default_factory=EventQueue)
    has_begun: bool = False  # the engine has said something about it
    refusal: InvalidRequest | Overloaded | None = None  # the engine found, before any token, that it cannot serve it
    started_s: float = field(default_factory=time.monotonic)


class AsyncEngineClient:
    """See the module and `interface.EngineClient`. Made and used on one running event loop.

    Args:
        engine: started and ready; from here on the client owns it.
        ready: what it said.
        template: the model's chat templates.
        max_queue_len: requests that may wait; None = no limit.
    """

    def __init__(
        self,
        engine: EngineHandle,
        ready: Ready,
        model_config: ModelConfig,
        tokenizer: Tokenizer | NoTokenizer,
        template: ChatTemplate,
        max_queue_len: int | None,
    ) -> None:
        self.model_config = model_config
        self.max_model_len = ready.max_model_len
        self.tokenizer: TokenizerFace = tokenizer
        self.template_text = template.text
        self.template_variables = template.variables()
        self.grammar_kinds: frozenset[GrammarKind] = frozenset(ready.grammar_kinds)
        self.kv_capacity_tokens, self.kv_groups = ready.kv_capacity_tokens, ready.kv_groups
        self.ready = ready
        self._tokenizer = tokenizer
        self._template = template
        self._engine = engine
        self._channel = engine.channel
        self._texts = TokenTexts(tokenizer)
        self._gate = Gate(max_queue_len, ready.max_num_seqs)
        self._live: dict[str, _Live] = {}
        self._none_live = asyncio.Event()
        self._none_live.set()
        self._num_submitted = 0
        self._calls: dict[int, asyncio.Future[tuple[bool, str | None]]] = {}
        self._num_calls = 0
        self._stats: EngineStats | None = None
        self._death: str | None = None
        self._is_draining = False
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self._receiver = threading.Thread(target=self._receive, name="engine-receive", daemon=True)
        self._receiver.start()
        self._ask_stats()

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
        """See `interface.EngineClient.render_chat`. May be called on any thread; a long chat is best given one."""
        if isinstance(self._tokenizer, NoTokenizer):
            raise InvalidRequest(f"messages are text, but {NO_TOKENIZER}", param="messages")
        return render_chat_ids(
            self._tokenizer,
            self._template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
            check=self._check_fits if must_fit else None,
        )

    def _check_fits(self, text: str) -> None:
        check_fits(self._tokenizer, text, self.max_model_len)

    # -- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `interface.EngineClient.generate`. Nothing is submitted before the first event is asked for."""
        live = self._submit(request)
        num_left = len(live.streams)
        has_yielded = False
        try:
            while num_left:
                events = await live.events.take()
                if self._death is not None and not has_yielded and not live.has_begun:
                    raise EngineDead(self._death)
                if live.refusal is not None:
                    raise live.refusal
                has_yielded = True
                for event in events:
                    num_left -= event.finish_reason is not None
                    yield event
        finally:
            self._leave(live)

    def abort(self, request_id: str) -> None:
        """See `interface.EngineClient.abort`."""
        for live in self._live.values():
            if live.request.request_id == request_id:
                self._send_abort(live.wire_id, None)

    def _submit(self, request: GenerationRequest) -> _Live:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._is_draining or self._is_closing:
            raise Overloaded(SHUTDOWN_MESSAGE, DRAIN_RETRY_S, draining=True)
        sampling = check_request(request, self.model_config.vocab_size, self.max_model_len)
        if sampling.stop and isinstance(self._tokenizer, NoTokenizer):
            raise InvalidRequest(f"stop strings are text, but {NO_TOKENIZER}, or use stop_token_ids", param="stop")
        num_prompt_tokens = len(request.prompt_token_ids)
        streams = [
            SequenceStream(
                index,
                sampling,
                num_prompt_tokens,
                self.model_config.eos_token_ids,
                Detokenizer(self._tokenizer, sampling.skip_special_tokens, continues=True),
                self._texts,
            )
            for index in range(sampling.n)
        ]
        self._num_submitted += 1
        live = _Live(f"{request.request_id}#{self._num_submitted}", request, streams)
        message = AddRequest(
            request_id=live.wire_id,
            prompt_token_ids=list(request.prompt_token_ids),
            sampling=sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=self._to_the_end(request.grammar, sampling),
            arrival_s=time.time(),
        )
        self._gate.admit(0 if self._stats is None else self._stats.num_waiting)
        self._live[live.wire_id] = live
        self._none_live.clear()
        try:
            self._channel.send(message)
        except OverflowError:
            self._forget(live)
            raise InvalidRequest("the request holds an integer of more than 64 bits; use a smaller one") from None
        except EngineDead:
            self._forget(live)
            raise
        return live

    def _to_the_end(self, grammar: GrammarSpec | None, sampling: SamplingParams) -> GrammarSpec | None:
        """The grammar; the output may not end before it has started."""
        if grammar is None or grammar.starts_after is None:
            return grammar
        eos_token_ids = () if sampling.ignore_eos else self.model_config.eos_token_ids
        withheld = {*grammar.withheld, *eos_token_ids, *sampling.stop_token_ids}
        withheld -= set(grammar.bridge[:1] or grammar.starts_after)
        return msgspec.structs.replace(grammar, withheld=tuple(sorted(withheld)))

    def _leave(self, live: _Live) -> None:
        """The iterator is over: by itself, or because its consumer left."""
        if any(not stream.is_finished for stream in live.streams):
            self._send_abort(live.wire_id, None)
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        del self._live[live.wire_id]
        self._gate.ended(len(live.streams), live.has_begun, time.monotonic() - live.started_s)
        if not self._live:
            self._none_live.set()

    def _send_abort(self, wire_id: str, index: int | None) -> None:
        try:
            self._channel.send(AbortRequest(wire_id, index))
        except EngineDead:
            pass  # nothing is left to abort; the receiver ends the sequences

    def _ask_stats(self) -> None:
        """The engine's first snapshot may have come together with `Ready`, to a reader who wanted only that; the next
        is sent with the first step, and until then /metrics would have no numbers of the engine."""
        try:
            self._channel.send(Command(0, "stats"))  # calls are numbered from 1: nobody waits for this one
        except EngineDead:
            pass  # the receiver finds out, and says why

    # -- news from the engine --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """The receiver thread: until the engine has ended or the client closes."""
        while not self._is_closing:
            messages = self._channel.receive()
            exited = self._engine.exit_code is not None
            if exited:
                messages += self._channel.receive(LAST_WORDS_S)
                messages.append(Fatal(describe_exit(self._engine.exit_code)))
            if not messages:
                continue  # woken
            try:
                self._loop.call_soon_threadsafe(self._take, messages)
            except RuntimeError:
                return  # the loop is closed: nobody waits for news
            if exited:
                return

    def _take(self, messages: list[FromEngine]) -> None:
        for message in messages:
            match message:
                case Outputs(sequences=outputs):
                    for output in outputs:
                        self._take_output_alone(output)
                case EngineStats():
                    self._stats = message
                case Reply():
                    call = self._calls.pop(message.call_id, None)
                    if message.stats is not None:
                        self._stats = message.stats
                    if call is not None and not call.done():
                        call.set_result((message.ok, message.text if message.ok else message.error))
                case Fatal(error=error):
                    self._die(error)
                case Ready():
                    logger.error("dropped a second Ready of the engine")

    def _take_output_alone(self, output: SequenceOutput) -> None:
        """What goes wrong with the output of one request (a token without text, say) ends that request and no other."""
        try:
            self._take_output(output)
        except Exception as error:
            logger.exception("request %s: its output could not be read", output.request_id)
            live = self._live[output.request_id]
            self._send_abort(live.wire_id, None)
            self._end(live, "error", f"the output could not be turned into text: {type(error).__name__}: {error}")

    def _take_output(self, output: SequenceOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return  # its consumer has left
        stream = live.streams[output.index]
        if stream.is_finished:
            return  # a stop string ended it; the engine did not know yet
        is_first = not live.has_begun
        if is_first:
            live.has_begun = True
            self._gate.began(len(live.streams))
        if is_first and output.error_code == INVALID_GRAMMAR and live.request.grammar is not None:
            live.refusal = InvalidRequest(output.error or "", param=live.request.grammar.param, code=INVALID_GRAMMAR)
        if is_first and output.error_code == GRAMMARS_BUSY:
            live.refusal = Overloaded(output.error or "", RETRY_S)
        event = stream.feed(output)
        live.events.put(event)
        if event.finish_reason is not None and output.finish_reason is None:
            self._send_abort(live.wire_id, output.index)

    def _die(self, error: str) -> None:
        """The engine is gone: end everything. Later calls change nothing, the first error is the cause."""
        if self._death is not None or self._is_closing:
            return
        self._death = error
        logger.error("the engine is dead: %s", error)
        for live in self._live.values():
            self._end(live, "error", f"the engine died: {error}")
        for call in self._calls.values():
            if not call.done():
                call.set_result((False, error))
        self._calls.clear()

    def _end(self, live: _Live, reason: FinishReason, error: str) -> None:
        """End what is left of a request from here."""
        for stream in live.streams:
            if not stream.is_finished:
                live.events.put(stream.end(reason, error))

    # -- the engine as a whole -------------------------------------------------------------------------------------

    async def command(
        self, name: CommandName, timeout_s: float = 20.0, profile: ProfileOptions | None = None
    ) -> tuple[bool, str | None]:
        """See `interface.EngineClient.command`."""
        if self._death is not None:
            return False, self._death
        self._num_calls += 1
        call_id = self._num_calls
        call = self._calls[call_id] = self._loop.create_future()
        try:
            self._channel.send(Command(call_id, name, profile))
            return await asyncio.wait_for(call, timeout_s)
        except EngineDead as error:
            return False, str(error)
        except TimeoutError:
            return False, f"the engine did not answer {name} within {timeout_s:g} s"
        finally:
            self._calls.pop(call_id, None)

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._is_closing

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    async def drain(self, timeout_s: float) -> None:
        """See `interface.EngineClient.drain`."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._none_live.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests still ran after %g s of draining; they end now", len(self._live), timeout_s)
        self._end_all(SHUTDOWN_MESSAGE)

    async def close(self) -> None:
        """End what still runs with an error event, then the engine. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        self._end_all(SHUTDOWN_MESSAGE)
        for call in self._calls.values():
            if not call.done():
                call.set_result((False, SHUTDOWN_MESSAGE))
        await asyncio.to_thread(self._stop)

    def _end_all(self, error: str) -> None:
        for live in self._live.values():
            if any(not stream.is_finished for stream in live.streams):
                self._send_abort(live.wire_id, None)
                self._end(live, "error", error)

    def _stop(self) -> None:
        self._channel.wake()
        self._receiver.join()
        self._engine.stop()
