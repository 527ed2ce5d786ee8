"""Attention backends, one a file, behind `interface.AttentionBackend`."""
