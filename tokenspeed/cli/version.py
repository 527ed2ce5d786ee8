"""`tokenspeed version`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from tokenspeed.protocol.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Print the version."""
    if argv:
        raise ConfigError(f"`tokenspeed version` takes no arguments, but was given: {' '.join(argv)}")
    print(f"TokenSpeed v{metadata.version('tokenspeed')}")
    return 0
