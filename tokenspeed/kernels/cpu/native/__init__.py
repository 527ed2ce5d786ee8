"""Decode kernels in C for CPUs, compiled on first use.

`build` compiles and caches, `library` binds, `context` serves the operations, `tape` records them.
"""
