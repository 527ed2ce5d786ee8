"""`tokenspeed` and `ts`: finds the subcommand and turns errors for users into one line and exit code 2.

A subcommand's module is imported only when it is called, so that `tokenspeed version` does not wait for the server's
libraries. Add a subcommand by adding its file and a line to SUBCOMMANDS.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import cast

from tokenspeed.protocol.errors import TokenSpeedError

EXIT_OK = 0
EXIT_HELP = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("tokenspeed.cli.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("tokenspeed.cli.chat", "chat with a running server in the terminal"),
    "bench": ("tokenspeed.cli.bench", "measure a server, the engine or single kernels"),
    "env": ("tokenspeed.cli.env", "report this machine and the installed packages"),
    "version": ("tokenspeed.cli.version", "print the version"),
}
"""Name -> (module with `run`, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the words after the command's name; None = those of this process.
    Returns:
        the exit code: 0 done, 1 no subcommand, 2 an error of the user, else the subcommand's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(usage())
        return EXIT_HELP
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return EXIT_OK
    if name == "--version":
        name = "version"
    if name not in SUBCOMMANDS:
        return _fail(f"unknown subcommand {name!r}, there are: {', '.join(SUBCOMMANDS)}")
    try:
        run = cast("Callable[[list[str]], int]", importlib.import_module(SUBCOMMANDS[name][0]).run)
        return run(rest)
    except TokenSpeedError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def usage() -> str:
    """Help of the command itself."""
    lines = [f"  {name:<9}{text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: tokenspeed SUBCOMMAND [arguments]   (`ts` is the same command)",
            "",
            *lines,
            "",
            "`tokenspeed SUBCOMMAND --help` lists a subcommand's flags.",
        ]
    )


def _fail(message: str) -> int:
    print(f"tokenspeed: error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
