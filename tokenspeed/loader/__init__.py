"""Brings a checkpoint's tensors to a model: headers first, everything compared, then the bytes."""
