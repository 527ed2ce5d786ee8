"""TokenSpeed: an LLM inference engine for agentic workloads."""

from importlib.metadata import version

__version__ = version("tokenspeed")
