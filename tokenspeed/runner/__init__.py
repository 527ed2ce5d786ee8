"""Device state, model runner, step graphs, KV pool. Obeys plans; never decides.

Owns every tensor that outlives a step. Never knows why a request was chosen, what its text means, or who sent it.
"""
