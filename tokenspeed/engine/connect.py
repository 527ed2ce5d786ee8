"""From a resolved configuration to a client that can be used: starts the engine, loads the tokenizer meanwhile.

The two ways to run an engine meet here: `start_engine` in a process of its own (the server), `start_local_engine` on a
thread (the offline API, which brings the builder of the runner and with it torch). No torch here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.client import AsyncEngineClient
from tokenspeed.engine.launch import START_TIMEOUT_S, EngineHandle, EngineProcess, EngineThread, wait_ready
from tokenspeed.observability.startup import startup_phase
from tokenspeed.runner.interface import Runner
from tokenspeed.text.chat_template import ChatTemplate, load_chat_template
from tokenspeed.text.codec import Tokenizer
from tokenspeed.text.no_tokenizer import NoTokenizer
from tokenspeed.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


async def start_engine(
    config: EngineConfig,
    *,
    log_level: str = "info",
    start_timeout_s: float = START_TIMEOUT_S,
    chat_template: str | None = None,
) -> AsyncEngineClient:
    """Start an engine process and connect to it. The loop stays free meanwhile.

    Args:
        log_level: of the engine's log (debug, info, warning, error).
        start_timeout_s: seconds that loading may take.
        chat_template: text that replaces the model's own template.

    Raises:
        ConfigError, CheckpointError: what cannot be used, in one line.
        EngineDead: the engine failed to start, or is not ready in time.
    """
    engine = await asyncio.to_thread(EngineProcess, config, log_level)
    return await _connect(engine, config, start_timeout_s, chat_template, config.max_queue_len)


async def start_local_engine(
    config: EngineConfig, build: Callable[[EngineConfig], Runner], chat_template: str | None = None
) -> AsyncEngineClient:
    """Run an engine on a thread of this process. Its queue has no limit: the caller waits for its own requests.

    Raises:
        As `start_engine`.
    """
    return await _connect(EngineThread(config, build), config, START_TIMEOUT_S, chat_template, None)


async def _connect(
    engine: EngineHandle,
    config: EngineConfig,
    start_timeout_s: float,
    chat_template: str | None,
    max_queue_len: int | None,
) -> AsyncEngineClient:
    ready_task = asyncio.create_task(asyncio.to_thread(wait_ready, engine, start_timeout_s))
    try:
        with startup_phase("tokenizer"):
            tokenizer, template = await asyncio.to_thread(_load_text, config, chat_template)
        ready = await asyncio.shield(ready_task)
    except BaseException:
        engine.kill()  # which also ends the wait, on the thread that reads the channel
        await asyncio.gather(ready_task, return_exceptions=True)
        await asyncio.to_thread(engine.stop, 0.0)
        raise
    for line in ready.report:
        logger.info("%s", line)
    return AsyncEngineClient(engine, ready, config.model, tokenizer, template, max_queue_len)


def _load_text(config: EngineConfig, chat_template: str | None) -> tuple[Tokenizer | NoTokenizer, ChatTemplate]:
    if config.skip_tokenizer_init:
        return NoTokenizer(config.model.vocab_size), ChatTemplate({}, special_tokens={}, spellings=())
    tokenizer = load_tokenizer(config.checkpoint, config.model, config.trust_remote_code)
    return tokenizer, load_chat_template(tokenizer, chat_template)
