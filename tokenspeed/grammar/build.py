"""From a configuration to the compiler of an engine, or to the reason why there is none. No torch."""

from __future__ import annotations

from tokenspeed.config.engine import EngineConfig
from tokenspeed.grammar.compiler import GrammarCompiler
from tokenspeed.grammar.interface import GrammarOptions, Vocabulary
from tokenspeed.grammar.select import BACKENDS, why_not
from tokenspeed.protocol.errors import ConfigError
from tokenspeed.text.tokenizer import load_tokenizer


def build_compiler(config: EngineConfig) -> tuple[GrammarCompiler | None, str]:
    """The compiler, and a line for the log. Nothing is loaded or started yet.

    Raises:
        ConfigError: a library was named that is not there.
    """
    wanted = config.grammar_backend
    if wanted == "none":
        return None, "grammar: none (--grammar-backend none); structured output is refused"
    if config.skip_tokenizer_init:
        return None, "grammar: none, there is no tokenizer (--skip-tokenizer-init); structured output is refused"
    reasons = {name: why_not(name) for name in (BACKENDS if wanted == "auto" else (wanted,))}
    for name, reason in reasons.items():
        if reason is None:
            compiler = GrammarCompiler(
                name,
                lambda: read_vocabulary(config),
                GrammarOptions(any_whitespace=config.any_whitespace),
                config.grammar_timeout_s,
            )
            lost = "".join(f"; not {other}: {why}" for other, why in reasons.items() if why is not None)
            return compiler, f"grammar: {name}{lost}"
    if wanted != "auto":
        raise ConfigError(f"--grammar-backend {wanted} cannot be used: {reasons[wanted]}")
    every = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return None, f"grammar: none, structured output is refused; {every}"


def read_vocabulary(config: EngineConfig) -> Vocabulary:
    """The bytes of every token of the model."""
    tokenizer = load_tokenizer(config.checkpoint, config.model, config.trust_remote_code)
    size = config.model.vocab_size
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(size)],
        special_ids=tuple(sorted(token_id for token_id in tokenizer.special_ids if token_id < size)),
        eos_token_ids=tuple(token_id for token_id in config.model.eos_token_ids if token_id < size),
    )
