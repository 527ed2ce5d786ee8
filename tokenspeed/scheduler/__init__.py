"""Request lifecycle, token budget, admission, preemption and policy. Never imports torch, never imports runner/."""
