"""Which grammar library is there, and the one way to open it. Asking imports nothing."""

from __future__ import annotations

import importlib
import importlib.util

from tokenspeed.grammar.interface import Backend, GrammarOptions, Vocabulary

BACKENDS = ("xgrammar", "llguidance")


def why_not(name: str) -> str | None:
    """Why a library of `BACKENDS` cannot be used here, or None."""
    if importlib.util.find_spec(name) is None:
        return f"the package {name} is not installed; `pip install {name}`"
    return None


def open_backend(name: str, vocabulary: Vocabulary, options: GrammarOptions) -> Backend:
    """Import the library and give it the vocabulary."""
    module = importlib.import_module(f"tokenspeed.grammar.{name}_backend")
    backend: Backend = module.open_backend(vocabulary, options)
    return backend
