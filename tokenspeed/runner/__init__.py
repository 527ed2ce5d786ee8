"""Device state, model runner, step graphs, memory profile and KV pool. Obeys plans; never decides."""
