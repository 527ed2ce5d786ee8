"""A tiny SentencePiece BPE vocabulary and what the `sentencepiece` package makes of some texts.

`python tests/text/sentencepiece_reference.py` (needs `pip install sentencepiece`) rewrites `sentencepiece_golden.json`;
the tests only read that file.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("sentencepiece_golden.json")

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "hello world  this is a test of the other thing",
    "12345 numbers and more numbers than the numbers",
    "naïve café déjà vu, the end.",
]

TEXTS = [
    "hello",
    "hello world",
    " leading",
    "two  spaces   three ",
    "the fox 123 45",
    "naïve 日本 😀",
    "tab\tnewline\n\nend",
    "<s>the</s>",
    "thethethe numbernumbers",
    "é\u0301",
]

if __name__ == "__main__":
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 50),
        model_writer=out,
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    size = model.vocab_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    cases = [{"text": text, "ids": model.encode(text), "decoded": model.decode(model.encode(text))} for text in TEXTS]
    GOLDEN.write_text(json.dumps({"metadata": metadata, "cases": cases}) + "\n")
