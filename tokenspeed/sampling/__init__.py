"""Logits to tokens: sampling and log-probabilities. Knows slots and parameters, nothing of models, caches or steps."""
