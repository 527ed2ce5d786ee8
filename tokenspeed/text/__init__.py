"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings. No torch, nothing of the engine."""
