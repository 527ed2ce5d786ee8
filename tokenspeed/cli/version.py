"""`tokenspeed version`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed import __version__
from tokenspeed.protocol.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Print the version."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: tokenspeed version\n\nPrints the version. There are no flags.")
        return 0
    if argv:
        raise ConfigError(f"`tokenspeed version` takes no arguments, but was given: {' '.join(argv)}")
    print(f"TokenSpeed v{__version__}")
    return 0
