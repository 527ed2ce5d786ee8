"""Ranks, axes and collectives. A mesh of one is the common case and costs nothing."""
