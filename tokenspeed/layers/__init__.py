"""Layers that models are made of; each owns its shard and its loading rules. Computes through `kernels.ops`."""
