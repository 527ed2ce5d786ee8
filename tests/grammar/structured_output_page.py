"""Renews the end of docs/serving/structured-output.md: `python tests/grammar/structured_output_page.py`.

The table of JSON schema keywords is that of the tests (`grammar_support.CASES`), so it says what has been tried.
"""

from __future__ import annotations

import json
from pathlib import Path

from grammar_support import CASES

from tokenspeed.grammar.format_patterns import LONG_CHARS
from tokenspeed.grammar.json_schema import MAX_DEPTH, MAX_NODES, MAX_PROPERTIES, UNSUPPORTED
from tokenspeed.grammar.json_schema import rewrite_schema as rewrite
from tokenspeed.grammar.patterns import MAX_CHARS, MAX_COPIES, MAX_GROUPS
from tokenspeed.grammar.schema_strings import MAX_HELD_LEN
from tokenspeed.grammar.schema_types import FORMATS
from tokenspeed.grammar.schema_values import MAX_ENUM
from tokenspeed.protocol.errors import InvalidRequest

PAGE = Path(__file__).parents[2] / "docs/serving/structured-output.md"
MARK = "<!-- From here on written by tests/grammar/structured_output_page.py -->\n"

TABLE = f"""
## JSON schema, keyword by keyword

Whatever is generated is valid under the schema as written. It may be less than all that is valid: properties that are
not named are not made up (unless `additionalProperties` says so; an object is open where neither `properties` nor
`patternProperties` stands, and `"properties": {{}}` names none), named ones come in the order of the schema, a pattern
matches the whole string, keywords without `type` imply theirs. Beside a pattern or a format, lengths narrow what is
generated; a `maxLength` above {MAX_HELD_LEN} is taken for {MAX_HELD_LEN} beside a pattern that would go on without end,
and a URI that may have {LONG_CHARS} characters has no more. Where properties with a constant tell the branches of a
`oneOf` apart, they are written, required or not. Arrays of `uniqueItems` are in the order of the enum. With
xgrammar a string with `maxLength` holds no escapes (no quote, backslash or line end), one with `minLength` only
behind that length, and above 16 none. Each line is a test with both libraries.

| Case | Schema | |
|---|---|---|
"""


def page() -> str:
    """The whole page: what was written by hand, then limits and table."""
    limits = [
        ("schemas inside a schema", MAX_NODES),
        ("depth", MAX_DEPTH),
        ("properties of one object", MAX_PROPERTIES),
        ("values of one enum", MAX_ENUM),
        ("characters of a regular expression", MAX_CHARS),
        ("groups inside groups of a regular expression", MAX_GROUPS),
        ("copies that counts in a regular expression ask for", MAX_COPIES),
    ]
    lines = ["| Limit | |", "|---|---|"]
    lines += [f"| {what} | {limit} |" for what, limit in limits]
    lines.append(TABLE.strip("\n").join(("\n", "")))
    for case in CASES:
        text = json.dumps(case.schema).replace("|", "\\|")
        lines.append(f"| {case.name} | `{text}` | {_verdict(case.schema)} |")
    lines.append("")
    lines.append("Refused wherever they stand: " + ", ".join(f"`{key}`" for key in UNSUPPORTED) + ".")
    lines.append("Enforced formats: " + ", ".join(f"`{name}`" for name in sorted(FORMATS)) + "; others are ignored.")
    lines.append(
        "Dates are days that there are, leap years included; the other formats are shapes (a second may be 60)."
    )
    lines.append(
        "With llguidance also refused: `propertyNames`, and a class that holds the character 0 by name without quote "
        "and backslash. What only the library refuses is, in a forced call of a tool without `strict`, left out: its "
        "properties are then held by name and type, or any object is taken."
    )
    return PAGE.read_text().split(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n"


def _verdict(schema: object) -> str:
    try:
        rewrite(schema, "x")
    except InvalidRequest as error:
        return "400: " + error.message.replace("|", "\\|")
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(page())
