"""An engine's life, in a process of its own or on a thread: build, say `Ready`, loop, say why it ended.

Knows the order of these steps and nothing of devices or processes: the caller brings the channel and the builder of
the runner. No torch, so that tests drive a whole engine process without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenspeed.cache.capacity import cache_profile
from tokenspeed.cache.manager import CacheManager
from tokenspeed.cache.spec import GroupSpec
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.channel import EngineEnd
from tokenspeed.engine.core import EngineCore
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.errors import CheckpointError, ConfigError
from tokenspeed.protocol.messages import Fatal, KVGroup, Ready
from tokenspeed.runner.interface import Runner
from tokenspeed.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

WARM_IDLE_S = 1.0

RANK, ROLE = 0, "target"
"""Of the startup records: there is one rank, and no draft model."""

EXIT_OK = 0
EXIT_FAILED = 1  # a bug or a dead device; the log has the traceback
EXIT_CONFIG = 2  # a ConfigError; its text is the whole story
EXIT_CHECKPOINT = 3  # a CheckpointError; likewise


def run_engine(
    channel: EngineEnd,
    config: EngineConfig,
    build: Callable[[EngineConfig], Runner],
    parent_pid: int | None = None,
) -> int:
    """Run one engine until it is told to stop, and close the channel.

    Args:
        channel: the engine's end.
        build: makes the runner; called once, here, so that what it raises reaches the client as `Fatal`.
        parent_pid: see `EngineCore`.

    Returns:
        The exit code of the process: one of the `EXIT_*`.
    """
    runner: Runner | None = None
    try:
        with startup_phase("scheduler.init", rank=RANK, role=ROLE):
            runner = build(config)
            runner.capture()
            core = _core(channel, config, runner, parent_pid)
        channel.send(_ready(config, runner))
        core.run()
        return EXIT_OK
    except ConfigError as error:
        channel.send(Fatal(str(error)))
        return EXIT_CONFIG
    except CheckpointError as error:
        channel.send(Fatal(str(error)))
        return EXIT_CHECKPOINT
    except Exception as error:
        logger.exception("the engine failed")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    finally:
        if runner is not None:
            runner.close()
        channel.close()


def _core(channel: EngineEnd, config: EngineConfig, runner: Runner, parent_pid: int | None) -> EngineCore:
    return EngineCore(
        channel,
        _scheduler(config, runner.groups),
        runner,
        enable_overlap=config.enable_overlap,
        parent_pid=parent_pid,
        # On a CPU, opening the grammar library would take cores from the model: it waits until there is nothing to do.
        warm_idle_s=WARM_IDLE_S if config.device == "cpu" else 0.0,
        decode_log_interval=config.decode_log_interval,
    )


def _scheduler(config: EngineConfig, groups: list[GroupSpec]) -> Scheduler:
    return Scheduler(
        cache=CacheManager(groups, config.enable_prefix_caching, config.max_num_batched_tokens),
        eos_token_ids=config.model.eos_token_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.schedule_policy,
        seed=config.seed,
    )


def _ready(config: EngineConfig, runner: Runner) -> Ready:
    cache = cache_profile(runner.groups, config.max_model_len, config.max_num_batched_tokens)
    return Ready(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_capacity_tokens=cache.context_tokens,
        kv_groups=[
            KVGroup(
                name=group.name,
                window=group.window,
                sequence_pages=group.sequence_pages,
                kept_tokens=group.kept_tokens,
            )
            for group in cache.groups
        ],
        vocab_size=config.model.vocab_size,
        report=[f"{choice.name}={choice.value}: {choice.reason}" for choice in config.choices] + list(runner.report),
        grammar_kinds=[] if runner.grammars is None else list(runner.grammars.kinds),
    )
