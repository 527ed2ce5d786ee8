"""How many tokens a text has at least, without tokenizing it: 30 MB take a minute, and cannot fit.

A token stands for at most as many bytes as the longest one does. That bounds the count from below only where nothing of
a text is lost on its way into tokens: no unknown character, no normalizer that shortens, no pre-tokenizer or
added token that swallows white space. Of a tokenizer with such a part, or with one not known here, nothing is said.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
import tokenizers.models

_COMPOSING = ("NFC", "NFKC")
_DECOMPOSING = ("NFD", "NFKD")

# Three characters can compose into one of two bytes (U+03B0); no character is of more of them a byte. Decomposing, or
# replacing one character by others, leaves at least one for each. tests/text hold all of Unicode to that.
_BYTES_A_CHAR = 2 / 3


class TokenBound:
    """The bound of one tokenizer.

    Args:
        backend: with its added tokens.
        longest: bytes that the longest token stands for.
        alphabet: the byte-level character of each of the 256 bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, longest: int, alphabet: list[str]) -> None:
        normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
        known = _keeps_spaces(backend) and _cuts_only(pre_tokenizer)
        lost = _lost_bytes(backend, alphabet)
        self._lost = lost or b""
        self._shrinks = _shrinks(normalizer)
        self._longest = max(1, longest) if known and None not in (lost, self._shrinks) else None

    def least(self, text: str) -> int:
        """A number of tokens that `text` has at least, 0 when nothing can be said. Special tokens that a post-processor
        adds are not counted."""
        if self._longest is None:
            return 0
        if not self._shrinks or text.isascii():
            num_bytes = len(text.encode("utf-8", "surrogatepass").translate(None, self._lost))
        else:
            num_bytes = 0 if self._lost else int(len(text) * _BYTES_A_CHAR)
        return -(-num_bytes // self._longest)


def _lost_bytes(backend: tokenizers.Tokenizer, alphabet: list[str]) -> bytes | None:
    """The bytes that leave no token behind; None: unknown characters may be one token together, however many."""
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    steps = _state(backend.normalizer) + _state(backend.pre_tokenizer)
    if any(step["type"] == "ByteLevel" for step in steps):
        return bytes(byte for byte in range(256) if backend.model.token_to_id(alphabet[byte]) is None)
    spellings = [f"<0x{byte:02X}>" for byte in range(256)]
    has_all = backend.model.byte_fallback and all(backend.model.token_to_id(one) is not None for one in spellings)
    return b"" if has_all else None


def _state(part: Any) -> list[dict[str, Any]]:
    """A component's steps. Its pickled state is its JSON; it has no other readable form."""
    return [] if part is None else _steps(json.loads(part.__getstate__()))


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    inner = state.get("normalizers") or state.get("pretokenizers") if state["type"] == "Sequence" else None
    return [state] if inner is None else [step for one in inner for step in _steps(one)]


def _shrinks(steps: list[dict[str, Any]]) -> bool | None:
    """Whether characters may be composed; None: more than that may go, or it is not known."""
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            plain = step["pattern"].get("String")
            if plain is None or len(step["content"].encode()) < len(plain.encode()):
                return None
        elif kind not in (*_COMPOSING, *_DECOMPOSING, "Prepend", "ByteLevel"):
            return None
    composing = [step for step in steps if step["type"] in (*_COMPOSING, *_DECOMPOSING)]
    if len(composing) > 1 or (composing and len(steps) > 1):
        return None  # no model has that; one after the other would have to be thought through
    return bool(composing)


def _cuts_only(steps: list[dict[str, Any]]) -> bool:
    return all(
        step["behavior"] != "Removed" if step["type"] in ("Split", "Punctuation") else step["type"] in _CUTTERS
        for step in steps
    )


_CUTTERS = ("ByteLevel", "Metaspace", "Digits")


def _keeps_spaces(backend: tokenizers.Tokenizer) -> bool:
    """No added token takes the white space beside it along."""
    return not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
