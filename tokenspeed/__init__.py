"""TokenSpeed: an LLM inference engine for agentic workloads."""
