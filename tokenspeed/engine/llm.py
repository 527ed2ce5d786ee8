"""The offline API: `LLM(model).generate(prompts, SamplingParams())` and `.chat(messages)`, in this process.

Owns the thread with the event loop, and the way from arguments to a running engine. Everything else is the client's.
Imports torch, through `runner.build`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from tokenspeed.checkpoint.resolve import resolve_checkpoint, resolve_tokenizer
from tokenspeed.config.args import DEFAULT_MODEL, EngineArgs
from tokenspeed.config.device import read_device_info
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import read_model_config
from tokenspeed.config.resolve import LONGER_CONTEXT_VARIABLE, resolve
from tokenspeed.config.server_args import ServerArgs
from tokenspeed.engine.admission import check_request
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.connect import start_local_engine
from tokenspeed.engine.interface import GenerationRequest
from tokenspeed.engine.outputs import CompletionOutput, RequestOutput
from tokenspeed.engine.run import RANK, ROLE
from tokenspeed.grammar.spec import one_of, pick
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.errors import ConfigError, EngineDead
from tokenspeed.protocol.grammar import GrammarSpec
from tokenspeed.protocol.sampling import SamplingParams
from tokenspeed.runner.build import build_runner

logger = logging.getLogger(__name__)

SEED_LIMIT = 2**30
MAX_SUBMITTED = 4096  # prompts in the engine's queue at a time; of a million, the rest wait here

Prompt = str | list[int]
Messages = list[dict[str, Any]]
T = TypeVar("T")


class LLM:
    """A model in this process.

        with LLM("default") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)

    Thread-safe. Call `close`, or use it in a `with` block, to free the model.

    Args:
        model: a folder, a .gguf file, a hub id, or `default`.
        options: fields of `config.args.EngineArgs` by name (`dtype="float32"`, `max_model_len=4096`), as far as they
            concern the engine; and `chat_template`, the name of one of the model's templates, or the text of another.

    Raises:
        ConfigError: an option that does not exist, concerns only the server, or cannot be used.
        CheckpointError: a model that cannot be found or read.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        _refuse_foreign(options)
        args = EngineArgs(model=model, **options)
        with startup_phase("model.config", rank=RANK, role=ROLE):
            config = configure(args)
        self._num_requests = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True)
        self._thread.start()
        try:
            self._client: AsyncEngineClient = self._wait(start_local_engine(config, build_runner, args.chat_template))
        except BaseException:
            self._end_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: a text, a list of token ids, or a list of these.
            sampling_params: for all, or one a prompt; None = `default_sampling_params()`.
            structured_outputs: what every output has to obey from its first token on: one of `json` (a schema or its
                text), `json_object` (True), `regex`, `choice` (a list), `grammar` (GBNF), `structural_tag`.

        Returns:
            One result a prompt, in order. One that fails in the engine has finish_reason "error"; the others stand.

        Raises:
            InvalidRequest: a prompt, parameter or constraint that cannot be used; nothing has been generated then.
            EngineDead: the engine failed.
        """
        each = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        ids = [self._client.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in each]
        return self._complete(texts, ids, sampling_params, structured_outputs)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of messages), or each of several.

        Args:
            structured_outputs: as in `generate`: a model that reasons is held to it from the first token on, too.
            tools: function descriptions in OpenAI's shape.
            add_generation_prompt: end the prompt with the beginning of an assistant message.
            continue_final_message: let the model go on with the last message; set add_generation_prompt to False then.
            chat_template: the name of one of the model's templates, or the text of another.
            chat_template_kwargs: further variables of the template.

        Returns, Raises:
            As `generate`.
        """
        chats: list[Messages] = []
        for one in messages:
            if isinstance(one, dict):
                chats = [[message for message in messages if isinstance(message, dict)]]
                break
            chats.append(one)
        ids = [
            self._client.render_chat(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs,
            )
            for chat in chats
        ]
        return self._complete([None] * len(ids), ids, sampling_params, structured_outputs)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config recommends; a base for `msgspec.structs.replace`."""
        defaults = self._client.model_config.sampling_defaults
        return msgspec.convert(defaults, SamplingParams, strict=False)

    def close(self) -> None:
        """End the engine and free the model. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._wait(self._client.close())
        self._end_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(
        self,
        texts: list[str | None],
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        structured_outputs: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        if self._is_closed:
            raise RuntimeError("this LLM has been closed")
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        each = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        grammar: GrammarSpec | None = pick(one_of(structured_outputs or {}, "structured_outputs"))
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one a prompt")
        with self._lock:
            first = self._num_requests
            self._num_requests += len(prompts)
        requests = [
            GenerationRequest(f"llm-{first + place}", ids, sampling, grammar=grammar)
            for place, (ids, sampling) in enumerate(zip(prompts, each, strict=True))
        ]
        for request in requests:
            check_request(request, self._client.model_config.vocab_size, self._client.max_model_len)
        return self._wait(self._gather(texts, requests))

    async def _gather(self, texts: list[str | None], requests: list[GenerationRequest]) -> list[RequestOutput]:
        room = asyncio.Semaphore(MAX_SUBMITTED)

        async def one(text: str | None, request: GenerationRequest) -> RequestOutput:
            async with room:
                return await self._one(text, request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*pair)) for pair in zip(texts, requests, strict=True)]
        results = [task.result() for task in tasks]
        if any(output.error is not None for result in results for output in result.outputs):
            # Was it a prompt, or the engine? A dying engine ends its sequences before it says that it dies.
            is_alive, error = await self._client.command("ping")
            if not is_alive:
                raise EngineDead(error)
        return results

    async def _one(self, text: str | None, request: GenerationRequest) -> RequestOutput:
        sampling = request.sampling
        outputs = [
            CompletionOutput(index, logprobs=None if sampling.logprobs is None else []) for index in range(sampling.n)
        ]
        prompt_logprobs: list[Any] | None = None if sampling.prompt_logprobs is None else []
        result = RequestOutput(request.request_id, text, request.prompt_token_ids, outputs, prompt_logprobs)
        async for event in self._client.generate(request):
            result.take(event)
        return result

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread. Ctrl-C here cancels the work there, which aborts its requests."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others are its consequences
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    each: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            return [[token_id for token_id in prompts if isinstance(token_id, int)]]
        each.append(item)
    return each


def _refuse_foreign(options: dict[str, Any]) -> None:
    """Options that do not exist or would have no effect here."""
    known = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    server = {field.name for field in dataclasses.fields(ServerArgs)} - {"chat_template"} | {"max_queue_len"}
    for name in options:
        if name not in known:
            raise ConfigError(f"LLM has no option {name!r}; see the flags in docs/configuration/server.md")
        if name in server:
            raise ConfigError(f"{name} concerns only the server; leave it out of LLM(...)")


def configure(args: EngineArgs) -> EngineConfig:
    """Find and read the model, and decide everything.

    Raises:
        ConfigError, CheckpointError: what cannot be used.
    """
    checkpoint = resolve_checkpoint(
        args.model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format
    )
    if args.tokenizer is not None:
        path = resolve_tokenizer(args.tokenizer, download_dir=args.download_dir)
        checkpoint = msgspec.structs.replace(checkpoint, tokenizer_path=path)
    config, _ = resolve(
        args,
        checkpoint,
        read_model_config(checkpoint, args.hf_overrides or {}),
        read_device_info(),
        drawn_seed=secrets.randbelow(SEED_LIMIT),
        allow_longer_context=os.environ.get(LONGER_CONTEXT_VARIABLE, "") in ("1", "true"),
    )
    return config
