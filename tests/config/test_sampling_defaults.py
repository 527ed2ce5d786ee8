"""What generation_config.json recommends has to be what a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.config.fields import Fields
from tokenspeed.config.model import _sampling_defaults
from tokenspeed.protocol.errors import CheckpointError


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "between 0.0 and 1.0"),
        ({"temperature": -0.5}, "temperature is -0.5, it must be between 0.0 and 2.0; correct it there"),
        ({"temperature": "hot"}, "expected a number"),
        ({"temperature": True}, "expected a number"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
    ],
)
def test_sampling_defaults_are_what_a_request_may_say(generation: dict[str, Any], words: str) -> None:
    """A top_p of 0 there started, and then every request was refused that did not say another."""
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as raised:
        _sampling_defaults(Fields("generation_config.json", generation))
    assert words in str(raised.value) and "\n" not in str(raised.value)
