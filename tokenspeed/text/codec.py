"""A model's tokenizer: text to ids, ids to exact bytes.

Owns the law that a special token is special only where the *template* wrote it: its spelling in a user's text is
ordinary text (`encode` with `parse_special=False`, `encode_rendered` for whole chats). Encoding is done by the
`tokenizers` library. Decoding is done here, on bytes, so that streaming (`text.detokenizer`) and one-shot decoding are
the same function. Where the backend comes from is the business of `text.tokenizer`, `text.gguf_tokenizer` and
`text.remote_tokenizer`.

Threads: every method may be called from any thread; the lazily filled tables only ever receive the one right value.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tokenspeed.protocol.errors import CheckpointError, InvalidRequest
from tokenspeed.text.token_bound import TokenBound

SPACE_MARK = "▁"
"""SentencePiece's visible space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How the spelling of a vocabulary entry stands for bytes.

    Fields:
        byte_level: GPT-2's table: one printable character a byte.
        byte_fallback: `<0x0A>` stands for that byte.
        space_mark: the character that stands for a space, or None.
        strip_leading_space: a text's first space was put there by the encoder and is dropped again.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    space_mark: str | None = None
    strip_leading_space: bool = False


class Tokenizer:
    """Satisfies `engine.interface.TokenizerFace`.

    Args:
        backend: a `tokenizers` tokenizer with its model, normalizer, pre-tokenizer, decoder, post-processor and added
            tokens. Taken over: truncation and padding are switched off.
        vocab_size: rows of the model's embedding; may exceed the tokenizer's own (padding).
        special_tokens: by role, as templates name them: `{"bos_token": "<s>", ...}`.
        chat_templates: Jinja sources by name; `default` is the usual one. Empty when the model has none.
        origin: file or folder, for error messages.

    Raises:
        CheckpointError: the tokenizer's decoder is of a kind that has no exact bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        origin: str,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        added = sorted(backend.get_added_tokens_decoder().items())
        self.vocab_size = vocab_size
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.special_spellings = {token.content: token_id for token_id, token in added if token.special}
        self.special_ids = frozenset(self.special_spellings.values())
        self.rule = decode_rule(backend, origin)
        self._added = added
        self._added_ids = frozenset(token_id for token_id, _ in added)
        self._parsing = backend
        self._plain = _sibling(backend, [token for _, token in added], origin)
        self._plain.encode_special_tokens = True
        unknown = self.special_spellings.get(getattr(backend.model, "unk_token", None) or "")
        self._never_from_text = self.special_ids - {unknown}
        # Longest first: alternation takes the first branch that fits, `tokenizers` the longest.
        spellings = sorted(self.special_spellings, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, spellings)) if spellings else r"(?!)")
        self._bytes: list[bytes | None] = [None] * max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._byte_table = {char: byte for byte, char in enumerate(byte_level_alphabet())}
        self._origin = origin
        self._guard_lock = threading.Lock()
        self._guard: _Guard | None = None
        self._bound: TokenBound | None = None

    @property
    def strips_leading_space(self) -> bool:
        """`decode` drops a text's first space (SentencePiece vocabularies whose encoder put it there)."""
        return self.rule.strip_leading_space

    def token_to_id(self, spelling: str) -> int | None:
        """The id of a vocabulary entry or added token with exactly this spelling."""
        token_id: int | None = self._parsing.token_to_id(spelling)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Text to token ids.

        Args:
            add_special_tokens: also what the model's post-processor adds (usually bos in front).
            parse_special: special-token spellings in `text` become those tokens. Only for text that no user wrote.

        Raises:
            InvalidRequest: `text` is not valid Unicode (a lone surrogate).
        """
        if parse_special:
            return self._run(self._parsing, text, add_special_tokens)
        encoding = self._encoding(self._plain, text, False)
        body: list[int] = encoding.ids
        ids = self._plain.post_process(encoding, add_special_tokens=True).ids if add_special_tokens else body
        return ids if self._never_from_text.isdisjoint(body) else self._encode_broken(text, ids, body)

    def encode_rendered(self, text: str, breaker: str) -> list[int]:
        """Ids of a rendered chat, in which users' spellings of special tokens have been broken by `breaker`.

        Whole spellings become special tokens; broken ones, with the breaker taken out again, are ordinary text. A text
        without breaker gives exactly `encode(text, add_special_tokens=False, parse_special=True)`.

        Args:
            breaker: one character that occurs in no text of user or template.
        """
        if breaker not in text:
            return self._run(self._parsing, text)
        guard = self._guarded()

        def respell(match: re.Match[str]) -> str:
            # One character cannot be broken from inside, so the breaker in front of it counts.
            broken = len(match[0]) == 1 and text[match.start() - 1 : match.start()] == breaker
            return match[0] if broken else guard.spellings[match[0]]

        marked = self._special_pattern.sub(respell, text).replace(breaker, "")
        return [guard.real_ids.get(token_id, token_id) for token_id in self._run(guard.backend, marked)]

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, however it is encoded; cheap. See `text.token_bound`."""
        if self._bound is None:
            longest = max(len(self.token_bytes(token_id)) for token_id in range(len(self._bytes)))
            self._bound = TokenBound(self._parsing, longest, byte_level_alphabet())
        return self._bound.least(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids to text: the tokens' bytes read as UTF-8, invalid parts as U+FFFD.

        Unlike `transformers` it never applies `clean_up_tokenization_spaces`, which would change text already sent.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join([self.token_bytes(token_id) for token_id in token_ids if token_id not in skip])
        if self.rule.strip_leading_space and raw[:1] == b" ":
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for (its spelling in UTF-8 for special tokens); empty for padding ids.

        Raises:
            InvalidRequest: a negative id.
        """
        if token_id < 0:
            raise InvalidRequest(f"token id {token_id} is negative; ids run from 0 to {self.vocab_size - 1}")
        if token_id >= len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        spelling = self._parsing.id_to_token(token_id)
        if spelling is None:
            return b""
        if token_id in self.special_ids:
            return spelling.encode()
        if self.rule.byte_fallback and token_id not in self._added_ids and (match := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes([int(match[1], 16)])
        if self.rule.byte_level and token_id not in self._added_ids:
            table = self._byte_table
            if all(char in table for char in spelling):
                return bytes([table[char] for char in spelling])
        if self.rule.space_mark is not None:
            spelling = spelling.replace(self.rule.space_mark, " ")
        return spelling.encode()

    def _encoding(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch of one, because `encode` holds the interpreter lock: a long text would stop every other thread. "Fast"
        # leaves out the offsets, which nobody reads.
        try:
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:
            try:
                text.encode()
            except UnicodeEncodeError as bad:
                raise InvalidRequest(
                    f"the text holds a lone surrogate (U+{ord(text[bad.start]):04X}) at character {bad.start}, which "
                    "is no Unicode character; send valid Unicode"
                ) from error
            raise

    def _run(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encoding(backend, text, add_special_tokens).ids

    def _encode_broken(self, text: str, ids: list[int], body: list[int]) -> list[int]:
        """For the rare vocabulary whose own merges spell a special token: encode around a cut inside each spelling."""
        cuts = [0, *[match.start() + 1 for match in self._special_pattern.finditer(text)], len(text)]
        pieces = [self._run(self._plain, text[a:b]) for a, b in itertools.pairwise(cuts)]
        broken = [token_id for piece in pieces for token_id in piece]
        if not self._never_from_text.isdisjoint(broken):
            raise InvalidRequest("the text holds the spelling of a special token that the vocabulary cannot avoid")
        if len(ids) == len(body):
            return broken
        start = next(i for i in range(len(ids)) if ids[i : i + len(body)] == body)
        return ids[:start] + broken + ids[start + len(body) :]

    def _guarded(self) -> _Guard:
        with self._guard_lock:
            if self._guard is None:
                self._guard = _Guard.build(self._parsing, self._added, self._origin)
            return self._guard


@dataclass(frozen=True, slots=True)
class _Guard:
    """A twin of the backend that knows special tokens only by secret spellings.

    A chat in which someone spelled a special token cannot be cut into pieces and encoded piece by piece: tokenizers
    treat the start of a text in ways of their own (prefix space, stripping). So the template's tokens are respelled,
    and the whole text is encoded at once by a tokenizer to which the usual spellings mean nothing.
    """

    backend: tokenizers.Tokenizer
    spellings: dict[str, str]  # usual spelling -> secret spelling
    real_ids: dict[int, int]  # id of the secret spelling -> id of the special token

    @staticmethod
    def build(parsing: tokenizers.Tokenizer, added: list[tuple[int, AddedToken]], origin: str) -> _Guard:
        backend = _sibling(parsing, [token for _, token in added], origin)
        backend.encode_special_tokens = True
        nonce = secrets.token_hex(16)  # unguessable, so that no user can write a secret spelling
        special = [(token_id, token) for token_id, token in added if token.special]
        spellings = {token.content: f"\ufdd0{nonce}:{index}\ufdd1" for index, (_, token) in enumerate(special)}
        backend.add_tokens(
            [
                AddedToken(
                    spellings[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for _, token in special
            ]
        )
        ids_by_spelling = backend.get_vocab(with_added_tokens=True)
        real_ids = {ids_by_spelling[spellings[token.content]]: token_id for token_id, token in special}
        return _Guard(backend, spellings, real_ids)


def _sibling(backend: tokenizers.Tokenizer, added: list[AddedToken], origin: str) -> tokenizers.Tokenizer:
    """A second tokenizer over the same model object: no copy of the vocabulary, its own added tokens and switches."""
    twin = tokenizers.Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            setattr(twin, name, part)
    twin.add_tokens(added)  # keeps each token's own `special` flag
    if twin.get_added_tokens_decoder().keys() != backend.get_added_tokens_decoder().keys():
        raise CheckpointError(f"{origin}: the ids of the added tokens have gaps; fill the gaps in added_tokens")
    return twin


def byte_level_alphabet() -> list[str]:
    """GPT-2's character for each of the 256 bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(printable))
    return [alphabet[byte] for byte in range(256)]


def decode_rule(backend: tokenizers.Tokenizer, origin: str) -> DecodeRule:
    """Read the rule off the backend's decoder.

    Raises:
        CheckpointError: a decoder whose text is not the concatenation of its tokens' bytes (WordPiece, CTC, none).
    """
    # A component's pickled state is its JSON; it has no other readable form.
    state: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level = byte_fallback = strip = False
    mark: str | None = None
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Metaspace":
            mark = step["replacement"]
            strip = strip or step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            mark = step["pattern"]["String"]
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            strip = True
        elif kind != "Fuse":
            raise CheckpointError(
                f"{origin}: the tokenizer's decoder {kind} is not supported; ByteLevel, Metaspace and "
                "Replace/ByteFallback/Fuse/Strip (SentencePiece) are"
            )
    return DecodeRule(byte_level, byte_fallback, mark, strip)
