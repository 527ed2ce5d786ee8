"""What a request's output has to obey. Made and checked by the server, compiled by the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "token_tag"]

INVALID_GRAMMAR = "invalid_grammar"
"""Code of the error that a grammar the engine cannot compile or follow ends its request with."""

GRAMMARS_BUSY = "grammars_busy"
"""Code of the error that says: as many grammars that take long wait to be compiled as may."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output.

    Fields:
        kind: what `text` is. "Any JSON object" is a schema, too.
        text: JSON schema as `grammar.json_schema` has rewritten it, regular expression (the whole output matches),
            grammar in GBNF notation with the rule `root`, or structural tag as JSON; a "token_tag" is one that names
            special tokens by id alone: its texts do not match them, however they are spelled.
        looser: texts of the same kind that ask for less, each to be tried where the library refuses those before it. Of
            a constraint that is to be held as far as that goes.
        starts_after: the token ids that end the reasoning; the constraint starts behind their first occurrence in the
            output. None: it starts at once.
        bridge: ids that lead from the reasoning to `starts_after`, which they end with: once the first has been
            sampled, the others follow. (): the model writes `starts_after` by itself.
        withheld: token ids that may not come before that, or the output could end without having obeyed: whatever ends
            a sequence, which the engine's client adds, and what leads out of the reasoning some other way.
        param: the request field it came from, for errors.
    """

    kind: GrammarKind
    text: str
    looser: tuple[str, ...] = ()
    starts_after: tuple[int, ...] | None = None
    bridge: tuple[int, ...] = ()
    withheld: tuple[int, ...] = ()
    param: str = "response_format"
