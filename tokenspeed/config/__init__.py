"""Wishes, the model's shape and the machine, resolved into one frozen configuration. Never imports torch."""
