"""XGrammar (Apache-2.0, arXiv 2411.15100) behind `interface.Backend`. The only file that imports `xgrammar`.

It calls native code that lets other Python threads run. Its warnings go to stderr from native code; what they are about
is refused before (`json_schema`, `patterns`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import xgrammar
from numpy.typing import NDArray

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError, GrammarOptions, MaskRow, Matcher, Vocabulary
from tokenspeed.grammar.name_pattern import NamePattern, patterns_of
from tokenspeed.grammar.well_formed import START, WellFormed
from tokenspeed.protocol.grammar import GrammarKind

MAX_WHITESPACE = 16
"""Characters of white space between two JSON tokens. Small models otherwise write blanks until max_tokens; pretty
printing needs a line break and the indentation."""

QUICK_S = 8.0
"""CPU seconds up to which a compilation is simply done twice. Measured: 48 tools with strings of limited length, 0.4 s
to compile, were more than 20 s in writing, which takes much memory, too."""

MAX_ESCAPED_BEHIND = 16
"""A least length of more leaves escapes out of the whole string: that costs compile time (10: 1.4 s, 100: 6 s)."""

MAX_FILL_THREADS = 8
"""That fill the masks of a step together."""

_CHARACTER, _MENDED_CHARACTER = r"[^\"\\\r\n]", r"[^\"\\\x00-\x1f]"
"""What the library writes for a character of a string of limited length, all but quote, backslash and line ends; and
what JSON has there."""

_TEXT_OR_CHARACTER = re.compile(rf'"(?:\\.|[^"\\])*"|{re.escape(_CHARACTER)}|\[(?:\\.|[^\]\\])*\]')
"""A text, the class above, any other class."""

_COUNTED_CHARACTER = re.compile(rf"^(\w+) ::= \(\({re.escape(_MENDED_CHARACTER)}\)\)$", re.MULTILINE)
"""A rule for such a character that is counted. Of a string of one character at most the class stands in its rule."""

_AT_LEAST = re.compile(r'^(\w+) ::= \(\("\\"" (\w+)\{([1-9]\d*), -1\} "\\""\)\)$', re.MULTILINE)
"""Its rule for a string without a most length."""

_LENGTHS = re.compile('"(?:min|max)Length"')

_STRING_CHARACTERS = (r"[^\0-\x1f\"\\\r\n]", _MENDED_CHARACTER)
"""What the library and `_mended` write for a character of a JSON string."""

_TOKENS = ("token", "trigger_tokens", "exclude_tokens")
"""Keys of a structural tag that hold tokens, by id or by spelling."""

_REST = r"""mended_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))
mended_first ::= (([^\"\\\x00-\x1f]) | ("\\" mended_escape))
mended_rest ::= (("\"") | ([^\"\\\x00-\x1f] mended_rest) | ("\\" mended_escape mended_rest))
"""
"""The rest of any JSON string, with its closing quote, and one character of it."""

_ORIGIN = re.compile(
    r"^\[[^\]]*\] \S+\.(?:cc|h):\d+: (?:Check failed: .* is (?:true|false): )?"
)  # "[07:29:40] /project/cpp/x.cc:94: "


class _Portable(msgspec.Struct, array_like=True):
    """What crosses from the worker: the grammar, and its compiled form where that took long."""

    kind: GrammarKind
    text: str
    written: str


class XGrammarBackend:
    """See `interface.Backend`."""

    def __init__(self, vocabulary: Vocabulary, options: GrammarOptions) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._well_formed = WellFormed(vocabulary)
        self._text_info = _info(vocabulary.text_tokens(), vocabulary)
        self._tag_info: xgrammar.TokenizerInfo | None = None
        self._id_info: xgrammar.TokenizerInfo | None = None
        self._many: xgrammar.BatchGrammarMatcher | None = None

    def compile(self, kind: GrammarKind, text: str) -> bytes:
        """See `interface.Backend.compile`. What was quick to compile is compiled again where it is loaded: written down
        it may be a thousand times its size (256 optional properties: 30 MB, 1.8 s there and back; 0.03 s to compile).
        """
        if kind == "json_schema":
            _check_patterns(json.loads(text))
        elif kind in ("structural_tag", "token_tag"):
            for schema in _tag_schemas(json.loads(text)):
                _check_patterns(schema)
        begin_s = time.thread_time()
        compiled = self._compile(kind, text)
        is_quick = time.thread_time() - begin_s < QUICK_S
        try:
            written = "" if is_quick else str(compiled.serialize_json())
        except RuntimeError as error:
            raise GrammarError("it is too large; make it smaller") from error
        return msgspec.msgpack.encode(_Portable(kind, text, written))

    def load(self, compiled: bytes) -> XGrammarCompiled:
        """See `interface.Backend.load`."""
        portable = msgspec.msgpack.decode(compiled, type=_Portable)
        if portable.written:
            info = self._info(portable.kind)
            grammar = xgrammar.CompiledGrammar.deserialize_json(portable.written, info)
        else:
            grammar = self._compile(portable.kind, portable.text)
        return XGrammarCompiled(grammar, self._vocabulary.eos_token_ids, self._well_formed)

    def fill_all(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> None:
        """See `interface.Backend`."""
        if self._many is None:
            self._many = xgrammar.BatchGrammarMatcher(max_threads=_num_threads())
        ours = [matcher for matcher in matchers if isinstance(matcher, XGrammarMatcher)]
        assert len(ours) == len(matchers), "matchers of another library"
        self._many.batch_fill_next_token_bitmask([matcher._matcher for matcher in ours], rows)
        for matcher, row in zip(ours, rows, strict=True):
            matcher._keep_well_formed(row)

    def _compile(self, kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
        compiler = xgrammar.GrammarCompiler(self._info(kind), max_threads=1, cache_enabled=False)
        try:
            return self._compile_with(compiler, kind, text)
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_reason(error)) from error

    def _compile_with(
        self, compiler: xgrammar.GrammarCompiler, kind: GrammarKind, text: str
    ) -> xgrammar.CompiledGrammar:
        match kind:
            case "json_schema":
                free = self._options.any_whitespace
                most = MAX_WHITESPACE if free else None
                mended = _mended(xgrammar.Grammar.from_json_schema(text, any_whitespace=free, max_whitespace_cnt=most))
                if mended is not None:
                    return compiler.compile_grammar(mended)
                return compiler.compile_json_schema(text, any_whitespace=free, max_whitespace_cnt=most)
            case "regex":
                return compiler.compile_regex(text)
            case "ebnf":
                return compiler.compile_grammar(text)
            case "structural_tag" | "token_tag":
                tag = _spelled_out(_with_ids(json.loads(text), _Ids(self._vocabulary)))
                text = json.dumps(tag)
                if not _LENGTHS.search(json.dumps(list(_tag_schemas(tag)))):
                    return compiler.compile_structural_tag(text)
                mended = _mended(xgrammar.Grammar.from_structural_tag(text))
                return compiler.compile_structural_tag(text) if mended is None else compiler.compile_grammar(mended)

    def _info(self, kind: GrammarKind) -> xgrammar.TokenizerInfo:
        """Structural tags may name special tokens by their spelling, token tags by id; everything else must not see
        them. The library takes tokens without bytes for such as never come, whatever names them."""
        match kind:
            case "structural_tag":
                self._tag_info = self._tag_info or _info(self._vocabulary.tokens, self._vocabulary)
                return self._tag_info
            case "token_tag":
                self._id_info = self._id_info or _info(self._vocabulary.named_tokens(), self._vocabulary)
                return self._id_info
            case _:
                return self._text_info


class XGrammarCompiled:
    """See `interface.CompiledGrammar`."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, eos_token_ids: tuple[int, ...], well_formed: WellFormed
    ) -> None:
        self._grammar = grammar
        self._num_bytes = 4 * int(grammar.memory_size_bytes) // 3
        self._eos_token_ids = eos_token_ids
        self._well_formed = well_formed

    @property
    def num_bytes(self) -> int:
        """With what the allocator adds: measured, 12 grammars of 48 tools that said 58 MB took 77."""
        return self._num_bytes

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), self._eos_token_ids, self._well_formed)


class XGrammarMatcher:
    """See `interface.Matcher`. The library takes some ill-formed UTF-8 for characters, which `well_formed` forbids."""

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, eos_token_ids: tuple[int, ...], well_formed: WellFormed
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._well_formed = well_formed
        self._states = bytearray((START,))  # in front of the output and behind each of its tokens

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    @property
    def failure(self) -> str | None:
        return None  # it has no limits of its own

    def fill(self, row: MaskRow) -> bool:
        if self._matcher.is_terminated():
            row[:] = 0
            for token_id in self._eos_token_ids:
                row.view("uint32")[token_id // 32] |= 1 << token_id % 32
            return True
        if not self._matcher.fill_next_token_bitmask(row[None]):
            row[:] = -1
        self._keep_well_formed(row)
        return True

    def accept(self, token_id: int) -> bool:
        state = self._well_formed.behind(self._states[-1], token_id)
        if state is None or not self._matcher.accept_token(token_id):
            return False
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        del self._states[len(self._states) - num_tokens :]

    def _keep_well_formed(self, row: MaskRow) -> None:
        """Take what would be ill-formed out of a mask.

        Raises:
            GrammarError: that leaves nothing inside a character.
        """
        state = self._states[-1]
        np.bitwise_and(row, self._well_formed.masks[state], out=row)
        if state != START and not row.any():
            raise GrammarError("it asks for characters between U+D800 and U+DFFF, which no text can hold")


def _num_threads() -> int:
    """For masks: half of this process's cores, the others have the engine's own threads to run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_FILL_THREADS, cores // 2))


def _info(tokens: list[bytes], vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(vocabulary.eos_token_ids)
    )


def _mended(grammar: xgrammar.Grammar) -> str | None:
    """The grammar written out, with no control character in strings of limited length; None when there are none.

    Escapes stand in such strings only behind the least length, and not at all in front of a most length: an alternative
    in a counted rule costs the library a walk over the vocabulary for every mask (measured with 152k tokens and a limit
    of 100: 120 ms, against 0.02).
    """
    written = str(grammar)
    text = _TEXT_OR_CHARACTER.sub(lambda found: _MENDED_CHARACTER if found[0] == _CHARACTER else found[0], written)
    if text == written:
        return None
    counted = {found[1] for found in _COUNTED_CHARACTER.finditer(text)}

    def at_least(found: re.Match[str]) -> str:
        rule, character, least = found[1], found[2], int(found[3])
        if character not in counted or least > MAX_ESCAPED_BEHIND:
            return found[0]
        first = "mended_first" if least == 1 else f"{character}{{{least}, {least}}}"
        return rf'{rule} ::= (("\"" {first} mended_rest))'

    text, num_open = _AT_LEAST.subn(at_least, text)
    return text + _REST if num_open else text


def _spelled_out(tag: Any) -> Any:
    """A structural tag in which JSON that has to leave texts out, and holds strings of limited length, is a grammar:
    the library knows only one of the two. All its strings leave the first character of these texts out."""
    if isinstance(tag, list):
        return [_spelled_out(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    schema = tag.get("json_schema")
    if tag.get("type") != "json_schema" or not tag.get("excludes"):
        return tag if schema is not None else {key: _spelled_out(item) for key, item in tag.items()}
    written = json.dumps(schema)
    if not _LENGTHS.search(written):
        return tag
    grammar = xgrammar.Grammar.from_json_schema(written, max_whitespace_cnt=tag.get("max_whitespace_cnt"))
    text = _mended(grammar) or str(grammar)
    cut = "".join(dict.fromkeys(f"\\U{ord(excluded[0]):08x}" for excluded in tag["excludes"]))
    for characters in _STRING_CHARACTERS:
        text = text.replace(characters, characters.replace("[^", f"[^{cut}"))
    return {"type": "grammar", "grammar": text}


class _Ids:
    """Ids by the spelling of a token, special tokens first: read off the vocabulary once for all names of a tag, of
    which there may be thousands."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_spelling: dict[bytes, int] | None = None

    def of(self, token: Any) -> Any:
        """A name's id; what is no name stays.

        Raises:
            GrammarError: no token is spelled so.
        """
        if not isinstance(token, str):
            return token
        if self._by_spelling is None:
            tokens = self._vocabulary.tokens
            ids = {tokens[token_id]: token_id for token_id in range(len(tokens) - 1, -1, -1)}  # the first one wins
            special = (*self._vocabulary.special_ids, *self._vocabulary.eos_token_ids)
            ids.update((tokens[token_id], token_id) for token_id in reversed(special))
            ids.pop(b"", None)
            self._by_spelling = ids
        token_id = self._by_spelling.get(token.encode("utf-8", "surrogatepass"))
        if token_id is None:
            raise GrammarError(f"no token is spelled {token[:100]!r}; name it by its id")
        return token_id


def _with_ids(tag: Any, ids: _Ids) -> Any:
    """A structural tag in which tokens that are named by their spelling are named by their id: the library knows no
    spelling where it makes a grammar of a tag.

    Raises:
        GrammarError: no token is spelled so.
    """
    if isinstance(tag, list):
        return [_with_ids(each, ids) for each in tag]
    if not isinstance(tag, dict):
        return tag
    done = {}
    for key, value in tag.items():
        if key in _TOKENS:
            done[key] = [ids.of(each) for each in value] if isinstance(value, list) else ids.of(value)
        elif key == "rules" and tag.get("type") == "token_dispatch":
            done[key] = [[ids.of(token), _with_ids(form, ids)] for token, form in value]
        else:
            done[key] = value if key == "json_schema" else _with_ids(value, ids)
    return done


def _check_patterns(schema: Any) -> None:
    """Refuse patterns that the library would follow out of the JSON string; see `NamePattern.escaped_part`.

    Raises:
        GrammarError: names the part.
    """
    for pattern in patterns_of(schema):
        part = NamePattern(pattern, Budget()).escaped_part()
        if part is not None:
            raise GrammarError(
                f"the pattern {pattern[:100]!r} holds {part[:40]!r}, which matches a quote, a backslash or a control "
                "character; a JSON string has these only escaped, and that cannot be enforced: leave them out"
            )


def _tag_schemas(tag: Any) -> Iterator[Any]:
    """The JSON schemas in a structural tag."""
    for child in tag if isinstance(tag, list) else tag.values() if isinstance(tag, dict) else ():
        yield from _tag_schemas(child)
    if isinstance(tag, dict) and tag.get("type") == "json_schema" and "json_schema" in tag:
        yield tag["json_schema"]


def _reason(error: Exception) -> str:
    """The library's message without its source file."""
    if isinstance(error, UnicodeError):  # Python's, of what the library has written
        return "it holds half a character: an escape between \\ud800 and \\udfff, or bytes that are no text"
    return _ORIGIN.sub("", str(error)).strip().split("\n")[0][:500] or "the library refuses it and does not say why"


def open_backend(vocabulary: Vocabulary, options: GrammarOptions) -> XGrammarBackend:
    """See `select.open_backend`."""
    return XGrammarBackend(vocabulary, options)
