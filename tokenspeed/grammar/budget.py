"""A bound on the work that one schema may ask of the server. No torch, no clock: one schema has always one answer."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.grammar.interface import GrammarError

MAX_STEPS = 250_000
"""Elementary comparisons; about 0.1 s of Python. Usual schemas take a few hundred."""


@dataclass(slots=True)
class Budget:
    """What is left of it."""

    num_steps: int = MAX_STEPS

    def spend(self, num_steps: int) -> None:
        """Take some.

        Raises:
            GrammarError: nothing is left.
        """
        self.num_steps -= num_steps
        if self.num_steps < 0:
            raise GrammarError(
                f"the JSON schema takes more than {MAX_STEPS} comparisons to check (allOf, anyOf, oneOf, uniqueItems, "
                "patternProperties and patterns with lengths multiply); make it smaller"
            )
