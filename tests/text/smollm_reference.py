"""An independent tokenizer for SmolLM2: the published algorithm, written plainly in Python, to check the fast one.

Shares nothing with `tokenspeed.text`: GPT-2's byte-level BPE (one merge at a time, best rank first) over pieces cut by
the model's two expressions: each digit alone, then GPT-2's. `python tests/text/smollm_reference.py` rewrites
`smollm_golden.json`.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import regex

GOLDEN = Path(__file__).with_name("smollm_golden.json")

NASTY = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\r\n  \n\t x",
    " " * 37 + "end",
    "\n" * 9,
    "1234567890 3.14159 1,000,000 ½ Ⅷ ٣٤٥ 五",
    "I'm you're he'll we've they'd it's DON'T",
    "emoji 😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "العربية مرحبا بالعالم ‏RTL‎ mark",
    "עברית שלום",
    "日本語の文章。中文字符，한국어 문장",
    "combining e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343",
    "null\x00byte \x01\x02\x7f control",
    "\ufeffbom \u200bzero\u200dwidth \u00a0nbsp \u3000ideographic \u2028line",
    "\U0010ffff\ufffe\ue000 \ufffd",
    "def f(x):\n    return x**2  # comment\n\n\tif x: pass",
    "<|im_start|>system\nYou are evil<|im_end|>\n<|endoftext|>",
    "<|im_end|><|im_end|> <|im_end |> <|im_start|",
    "a<repo_name>b<jupyter_start>",
    "Ġ Ċ ĉ Ā raw byte-level letters",
    "https://example.com/?q=a&b=c#d %20 C:\\path",
    "mixedЯзык与english123اختبار",
    "ＦＵＬＬ ｗｉｄｔｈ ﬁ ligature ß İ ı",
    "a" * 300,
    "thequickbrownfox" * 20,
    "!!!???...---___***===>>>",
]


class Reference:
    """Encodes text to ids; knows no special tokens."""

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self.tokens = tokens
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.rank = {tuple(merge.split(" ")): index for index, merge in enumerate(merges)}
        self.letters = self._letters()

    @staticmethod
    def _letters() -> dict[int, str]:
        letters, spare = {}, 0x100
        for byte in range(256):
            if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD):
                letters[byte] = chr(byte)
            else:
                letters[byte] = chr(spare)
                spare += 1
        return letters

    def encode(self, text: str) -> list[int]:
        words = []
        for part in regex.findall(r"\p{N}|\P{N}+", text):
            words += regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", part)
        assert "".join(words) == text
        return [index for word in words for index in self._word(word)]

    def _word(self, word: str) -> list[int]:
        # 21 bytes (0x04, 0xC0, 0xF1 and others that its training text lacked) have no entry: they are dropped, and
        # their neighbours may merge, as in the model's own tokenizer.json.
        pieces = [self.letters[byte] for byte in word.encode() if self.letters[byte] in self.ids]
        while len(pieces) > 1:
            pairs = list(itertools.pairwise(pieces))
            best = min(range(len(pairs)), key=lambda i: (self.rank.get(pairs[i], 1 << 30), i))
            if pairs[best] not in self.rank:
                break
            pieces[best : best + 2] = ["".join(pairs[best])]
        return [self.ids[piece] for piece in pieces]

    def decode(self, ids: list[int]) -> bytes:
        bytes_of = {letter: byte for byte, letter in self.letters.items()}
        return bytes(bytes_of[letter] for index in ids for letter in self.tokens[index])


if __name__ == "__main__":
    from tokenspeed.checkpoint.resolve import resolve_checkpoint

    fields = gguf.GGUFReader(resolve_checkpoint("default").tokenizer_path).fields
    reference = Reference(*(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")))
    lines = [json.dumps({"text": text, "ids": reference.encode(text)}) for text in NASTY]
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n")
