"""Benchmarks: of a server over HTTP, of the engine in this process, of single kernels. Measures; decides nothing."""
