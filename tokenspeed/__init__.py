"""TokenSpeed: an LLM inference engine for agentic workloads.

`tokenspeed.LLM` and `tokenspeed.SamplingParams` are the offline API. They load when first used, so that `import
tokenspeed` stays light for the server process and the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.engine.llm import LLM
    from tokenspeed.protocol.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"  # pyproject.toml reads it here, so that a bare source tree knows its version too

_HOMES = {"LLM": "tokenspeed.engine.llm", "SamplingParams": "tokenspeed.protocol.sampling"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    if name == "LLM":
        import_module("tokenspeed.engine.launch").bound_spinning()  # the next line imports torch
    return getattr(import_module(_HOMES[name]), name)
