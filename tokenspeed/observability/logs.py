"""One log format for every process. Rooms use `logging.getLogger("tokenspeed...")`; only entry points configure."""

from __future__ import annotations

import logging
import os
import sys

from tokenspeed.observability.startup import LOGGER, VARIABLE

QUIET_LIBRARIES = ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "transformers", "asyncio")


def configure_logging(level: str, process: str) -> None:
    """Send the log of this process to standard error. Called once, by the process's entry point.

    Args:
        level: debug, info, warning or error; lines of our own below it are dropped. Libraries say warnings and worse;
            startup timing is always heard when it was asked for.
        process: stands in every line (`server`, `engine`).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("tokenspeed").setLevel(level.upper())
    logging.getLogger(LOGGER).setLevel(logging.INFO if os.environ.get(VARIABLE) == "1" else logging.NOTSET)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
