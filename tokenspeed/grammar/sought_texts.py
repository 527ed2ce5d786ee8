"""A bound on the texts that a structural tag looks out for. No torch.

For each of their characters the library walks the vocabulary: about 1 ms with 50,000 tokens, ten in JSON. Excluded
texts of 60,000 characters kept a worker until its time was up; two of them, and nobody's grammar was compiled for half
a minute. What only stands in the output, like `const_string` or the begin of a tag, costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenspeed.grammar.interface import GrammarError

MAX_EXCLUDED = 32
MAX_EXCLUDED_CHARS = 256
MAX_EXCLUDED_JSON_CHARS = 64
"""Of one format: a few tags' spellings."""

MAX_EXCLUDED_CHARS_ALL = 1024
"""Of all formats of a tag; those in JSON count four times."""

MAX_SOUGHT_CHARS = 8192
"""Of all different ends, triggers and texts that rules are for: several hundred functions' names."""

MAX_REPEATS = 2**31 - 1
"""Beyond it the library knows no limit, and says so to nobody."""


def check_sought(form: Any) -> None:
    """Refuse a checked structural tag that would keep a worker for long.

    Raises:
        GrammarError: names the key, what it holds and the limit.
    """
    num_excluded = 0
    sought: set[str] = set()
    for node in _formats(form):
        num_excluded += _check_excluded(node)
        ends = node.get("end") if node.get("type") == "tag" else None
        rules = node.get("rules") if node.get("type") == "dispatch" else None
        found = [*_texts(ends), *_texts(node.get("triggers")), *(rule[0] for rule in rules or ())]
        sought.update(text for text in found if isinstance(text, str))
        for key in ("min", "max"):
            if isinstance(node.get(key), int) and node[key] > MAX_REPEATS:
                raise GrammarError(f"{key} is {str(node[key])[:30]}, the limit is {MAX_REPEATS}")
    if num_excluded > MAX_EXCLUDED_CHARS_ALL:
        raise GrammarError(
            f"excludes of all formats together have {num_excluded} characters (those in JSON count four times), the "
            f"limit is {MAX_EXCLUDED_CHARS_ALL}; exclude less"
        )
    num_sought = sum(map(len, sought))
    if num_sought > MAX_SOUGHT_CHARS:
        raise GrammarError(
            f"the different ends, triggers and texts of rules together have {num_sought} characters, the limit is "
            f"{MAX_SOUGHT_CHARS}; use fewer or shorter ones"
        )


def _check_excluded(node: dict[str, Any]) -> int:
    """What one format's excluded texts count."""
    texts = node.get("excludes") or ()
    is_json = node.get("type") == "json_schema"
    most = MAX_EXCLUDED_JSON_CHARS if is_json else MAX_EXCLUDED_CHARS
    num_chars = sum(map(len, texts))
    if len(texts) > MAX_EXCLUDED:
        raise GrammarError(f"excludes of a format holds {len(texts)} texts, the limit is {MAX_EXCLUDED}")
    if num_chars > most:
        raise GrammarError(
            f"excludes of a format of type {node.get('type')} has {num_chars} characters, the limit is {most}; exclude "
            "less"
        )
    return num_chars * 4 if is_json else num_chars


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _formats(form: Any) -> Iterator[dict[str, Any]]:
    """All formats, not what stands in schemas."""
    pending = [form]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            yield node
            pending.extend(value for key, value in node.items() if key != "json_schema")
