"""What the config reader accepts and what the families build is one list."""

from __future__ import annotations

from tokenspeed.config.model import SUPPORTED_ARCHITECTURES
from tokenspeed.models.registry import discover, examples


def test_every_accepted_architecture_has_a_family_and_an_example() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(discover())
    assert {example.architecture for example in examples()} == set(discover())
