"""Which grammar library is there, and the one way to open it. Asking imports nothing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from tokenspeed.grammar.interface import Backend, GrammarOptions, Vocabulary
from tokenspeed.protocol.grammar import GrammarKind

BACKENDS = ("xgrammar", "llguidance")
KINDS: Mapping[str, tuple[GrammarKind, ...]] = {
    "xgrammar": ("json_schema", "regex", "ebnf", "structural_tag", "token_tag"),
    "llguidance": ("json_schema", "regex", "ebnf"),
}


def why_not(name: str) -> str | None:
    """Why a library of `BACKENDS` cannot be used here, or None."""
    if importlib.util.find_spec(name) is None:
        return f"the package {name} is not installed; `pip install {name}`"
    return None


def import_backend(name: str) -> ModuleType:
    """Import the library, which takes about as long as torch; it may be done before there is a vocabulary."""
    return importlib.import_module(f"tokenspeed.grammar.{name}_backend")


def open_backend(name: str, vocabulary: Vocabulary, options: GrammarOptions) -> Backend:
    """Import the library and give it the vocabulary."""
    backend: Backend = import_backend(name).open_backend(vocabulary, options)
    return backend
