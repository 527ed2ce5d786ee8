"""llguidance (MIT) behind `interface.Backend`. The only file that imports `llguidance`.

It builds a matcher from the grammar's text lazily and has limits of its own on the work a token may cost, so what
crosses from the worker is that text, proven to build. Structural tags are not offered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from tokenspeed.grammar.interface import GrammarError, GrammarOptions, MaskRow, Matcher, Vocabulary
from tokenspeed.grammar.llguidance_patterns import held_in_strings
from tokenspeed.protocol.grammar import GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_WHITESPACE = 16  # as in `xgrammar_backend`


class LlguidanceBackend:
    """See `interface.Backend`."""

    def __init__(self, vocabulary: Vocabulary, options: GrammarOptions) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Bytes(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos_token_ids),
        )

    def compile(self, kind: GrammarKind, text: str) -> bytes:
        """See `interface.Backend.compile`."""
        try:
            grammar = self._grammar(kind, text)
        except GrammarError:
            raise
        except Exception as error:  # the converter raises bare Exception
            raise GrammarError(str(error)[:500]) from error
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if is_error:
            raise GrammarError(messages[0].strip().split("\n")[0][:500])
        return grammar.encode()

    def load(self, compiled: bytes) -> LlguidanceCompiled:
        """See `interface.Backend.load`."""
        matcher = llguidance.LLMatcher(self._tokenizer, compiled.decode(), log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip().split("\n")[0][:500])
        return LlguidanceCompiled(matcher, self._vocabulary, len(compiled))

    def fill_all(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> None:
        """See `interface.Backend`. One by one."""
        for matcher, row in zip(matchers, rows, strict=True):
            if not matcher.fill(row):
                row[:] = -1

    def _grammar(self, kind: GrammarKind, text: str) -> str:
        match kind:
            case "json_schema":
                space = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}" if self._options.any_whitespace else ""
                options: JsonCompileOptions = {"whitespace_flexible": self._options.any_whitespace}
                if space:
                    options["whitespace_pattern"] = space
                held = json.dumps(held_in_strings(json.loads(text)))
                return llguidance.LLMatcher.grammar_from_json_schema(held, overrides=options)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "ebnf":
                return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text))
            case "structural_tag" | "token_tag":
                raise GrammarError(
                    "llguidance has no structural tags; start the server with --grammar-backend xgrammar"
                )


class LlguidanceCompiled:
    """See `interface.CompiledGrammar`. The prototype never moves; matchers are copies of it."""

    def __init__(self, prototype: llguidance.LLMatcher, vocabulary: Vocabulary, text_bytes: int) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary
        self._text_bytes = text_bytes

    @property
    def num_bytes(self) -> int:
        """A guess: the library does not tell; automata grow while they are used."""
        return 64 * self._text_bytes + (1 << 16)

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._prototype.deep_copy(), self._vocabulary.eos_token_ids)


class LlguidanceMatcher:
    """See `interface.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._is_ended = False

    @property
    def is_terminated(self) -> bool:
        return self._is_ended

    @property
    def failure(self) -> str | None:
        return self._matcher.get_error().strip().split("\n")[0][:300] if self._matcher.is_error() else None

    def fill(self, row: MaskRow) -> bool:
        if not self._is_ended and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not self._matcher.is_error():
                return True
        # Ended, or a limit of the library was hit: `accept` will then say no to whatever is sampled.
        row[:] = 0
        for token_id in self._eos_token_ids:
            row.view("uint32")[token_id // 32] |= 1 << token_id % 32
        return True

    def accept(self, token_id: int) -> bool:
        if self._is_ended or self._matcher.is_error():
            return False
        if token_id in self._eos_token_ids:
            self._is_ended = bool(self._matcher.is_accepting())
            return self._is_ended
        # An unwanted token would put the matcher into a state that it never leaves.
        return self._matcher.validate_tokens([token_id]) == 1 and bool(self._matcher.consume_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if self._is_ended and num_tokens:
            self._is_ended = False  # the end itself was never given to the library
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)


class _Bytes:
    """The vocabulary as the library asks for it. It splits text into single bytes: only forced tokens, which are not
    used here, would want the model's own splitting."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_token_ids})
        special = set(self.special_token_ids)
        self._by_byte = {
            token: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if len(token) == 1 and token_id not in special
        }

    def __call__(self, text: bytes) -> list[int]:
        single = [bytes([byte]) for byte in text]
        return [self._by_byte[byte] for byte in single if byte in self._by_byte]


def open_backend(vocabulary: Vocabulary, options: GrammarOptions) -> LlguidanceBackend:
    """See `select.open_backend`."""
    return LlguidanceBackend(vocabulary, options)
