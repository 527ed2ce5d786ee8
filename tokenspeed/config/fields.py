"""Typed access to a parsed config file. Every complaint names the file, the field and what was expected."""

from __future__ import annotations

import math
from typing import Any

from tokenspeed.protocol.errors import CheckpointError

MAX_COUNT = 1 << 31
"""No count or length of a model is larger; a damaged file must not ask for more memory than there is."""


class Fields:
    """The fields of one JSON object (or of GGUF metadata turned into one). A null counts as absent.

    Args:
        where: the file, for errors.
        values: the object.
        prefix: spelling of the object inside the file (`rope_scaling.`).
    """

    def __init__(self, where: str, values: dict[str, Any], prefix: str = "") -> None:
        self.where = where
        self.values = values
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def bad(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.prefix}{name} is {self.get(name)!r}, expected {expected}")

    def missing(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.prefix}{name} is missing, expected {expected}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
        """Raises CheckpointError when absent without a default, not a whole number, or out of range."""
        value = self.get(name)
        expected = f"a whole number from {minimum} to {maximum}"
        if value is None:
            if default is None:
                raise self.missing(name, expected)
            return default
        # JSON written by some tools has 4096.0; true is an int for Python and a mistake here.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.bad(name, expected)
        return value

    def number(self, name: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number above `minimum`. Raises CheckpointError as `integer` does."""
        value = self.optional_number(name, minimum)
        if value is not None:
            return value
        if default is None:
            raise self.missing(name, f"a number above {minimum:g}")
        return default

    def optional_number(self, name: str, minimum: float = 0.0) -> float | None:
        """As `number`, None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, f"a number above {minimum:g}")
        if not math.isfinite(value) or value <= minimum:
            raise self.bad(name, f"a number above {minimum:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def token_id(self, name: str) -> int | None:
        ids = self.token_ids(name)
        if len(ids) > 1:
            raise self.bad(name, "one token id")
        return ids[0] if ids else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty when absent. -1 (an old spelling of none) is dropped."""
        value = self.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not -1 <= item <= MAX_COUNT:
                raise self.bad(name, "a token id or a list of token ids")
        return tuple(item for item in items if item >= 0)
