"""The one place that decodes JSON which a model or a history wrote: whatever the text, it is a value or a ValueError.

Python's parser recurses, and where it gives up depends on how deep the caller stands; so does whoever writes the value
out again. Depth is bounded here instead: what nests deeper than MAX_DEPTH is no JSON of ours.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Containers within containers. A request's own body has 64, of which a schema or a history takes some."""


def read_json(text: str, control_characters: bool = False) -> Any:
    """The value that `text` spells. `control_characters`: strings may hold them unescaped, as models write them.

    Raises:
        ValueError: no JSON (NaN and Infinity are none), an integer of thousands of digits, or too deep.
    """
    try:
        value = json.loads(text, strict=not control_characters, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"nests deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` spells, or None when it spells none."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        boxes = [item for item in level if isinstance(item, dict | list)]
        if not boxes:
            return
        level = [child for box in boxes for child in (box.values() if isinstance(box, dict) else box)]
    raise ValueError(f"nests deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
