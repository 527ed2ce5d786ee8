"""`tokenspeed serve`: wishes -> files -> model shape -> resolved configuration -> a running server. Wiring only.

All reading of the environment, of files named in flags and of the clock for a seed happens here, so that
`config.resolve` stays pure.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tokenspeed.catalog.chat_templates import builtin_chat_templates
from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.resolve import resolve_checkpoint, resolve_tokenizer
from tokenspeed.config.args import EngineArgs, parse_args
from tokenspeed.config.device import read_device_info
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.flags import declared_flags
from tokenspeed.config.model import read_model_config
from tokenspeed.config.resolve import LONGER_CONTEXT_VARIABLE, resolve
from tokenspeed.config.server import ServerConfig
from tokenspeed.engine.run import RANK, ROLE
from tokenspeed.observability.logs import configure_logging
from tokenspeed.observability.startup import startup_phase
from tokenspeed.protocol.echo import echo
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.server.app import run_server
from tokenspeed.server.formats import check_names
from tokenspeed.text.tokenizer import read_chat_templates

SEED_LIMIT = 2**30

OTHER_NAMES = {
    "max_num_batched_tokens": "chunked_prefill_size",
    "page_size": "prefix_granularity",
    "capture_sizes": "cudagraph_capture_sizes",
    "prefill_sizes": "prefill_graph_capture_sizes",
    "grammar_timeout_s": "grammar_compile_timeout_secs",
    "served_model_names": "served_model_name",
    "api_keys": "api_key",
    "drain_timeout_s": "drain_timeout",
    "log_requests": "enable_log_requests",
}
"""Resolved field -> the wish with the same value under another name."""


def run(argv: Sequence[str]) -> int:
    """Serve until told to stop.

    Returns:
        0 after an orderly end or `--dry-run`, else the server's exit code.
    Raises:
        ConfigError, CheckpointError: printed in one line by `main`.
    """
    args = parse_args(argv)
    level = "warning" if args.log_level == "warn" else args.log_level
    configure_logging(level, "server")
    with startup_phase("model.config", rank=RANK, role=ROLE):
        checkpoint = _find(args)
        args = replace(args, chat_template=_template_text(args.chat_template, checkpoint))
        model = read_model_config(checkpoint, args.hf_overrides or {})
        engine, server = resolve(
            args,
            checkpoint,
            model,
            read_device_info(),
            drawn_seed=secrets.randbelow(SEED_LIMIT),
            allow_longer_context=os.environ.get(LONGER_CONTEXT_VARIABLE, "") in ("1", "true"),
        )
    check_names(server, model)
    if args.dry_run:
        print("\n".join(describe(engine, server)))
        return 0
    return run_server(engine, server, args.engine_startup_timeout)


def describe(engine: EngineConfig, server: ServerConfig) -> list[str]:
    """The resolved configuration for a reader: every automatic choice with its reason, then what is left to the start
    because it takes the kernels, the libraries or the template, then every field, by its flag where that holds the same
    value. No keys."""
    lines = ["choices:"]
    lines += [f"  {choice.name} = {choice.value}: {choice.reason}" for choice in engine.choices]
    for config in (engine, server):
        for name in (name for name in config.__struct_fields__ if getattr(config, name) == "auto"):
            lines.append(f"  --{name.replace('_', '-')} = auto: chosen at start; the log says what and why")
    lines.append("engine:")
    for name in engine.__struct_fields__:
        if name not in ("model", "checkpoint", "choices"):
            lines.append(f"  {_flag_of(name)}: {getattr(engine, name)}")
    for title, part in (("model", engine.model), ("checkpoint", engine.checkpoint), ("server", server)):
        lines.append(f"{title}:")
        for name, value in msgspec.structs.asdict(part).items():
            shown = f"{len(value)} given" if name == "api_keys" and value else value
            lines.append(f"  {_flag_of(name) if part is server else name}: {shown}")
    return lines


def _flag_of(name: str) -> str:
    """The flag whose value a field of the engine's or the server's configuration is, else the field's name."""
    wish = OTHER_NAMES.get(name, name)
    flags = {declared.field_name: declared.flag.names[0] for declared in declared_flags(EngineArgs)}
    return flags.get(wish, name)


def _find(args: EngineArgs) -> Checkpoint:
    """The model's files, with the tokenizer's place replaced when `--tokenizer` names another."""
    checkpoint = resolve_checkpoint(
        args.model, revision=args.revision, download_dir=args.download_dir, load_format=args.load_format
    )
    if args.tokenizer is None:
        return checkpoint
    place = resolve_tokenizer(args.tokenizer, download_dir=args.download_dir)
    return msgspec.structs.replace(checkpoint, tokenizer_path=place)


def _template_text(value: str | None, checkpoint: Checkpoint) -> str | None:
    """`--chat-template` is the template itself when it holds Jinja braces, or a file, or the name of one of the model's
    or of ours."""
    if value is None or "{{" in value or "{%" in value:
        return value
    known = {**builtin_chat_templates(), **read_chat_templates(checkpoint.tokenizer_path)}
    if value in known and not Path(value).exists():
        return known[value]
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {echo(value)} is no readable file ({error}), no Jinja template and none of "
            f"{', '.join(known)}"
        ) from error
