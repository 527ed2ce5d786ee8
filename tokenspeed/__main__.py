"""`python -m tokenspeed` is the command `tokenspeed`."""

from __future__ import annotations

import sys

from tokenspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
