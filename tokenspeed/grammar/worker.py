"""Compiles grammars in a process that nothing else depends on: `python -m tokenspeed.grammar.worker LIBRARY`.

The engine writes frames to stdin and reads one answer a job from stdout. Each job runs in a fork of this process: a
grammar that never ends is killed by its own alarm, one that eats memory by its own limit, and neither costs the
vocabulary, which the fork shares. A frame is a little-endian uint32 length and as many bytes of MessagePack.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from tokenspeed.grammar.interface import Backend, GrammarError, GrammarOptions, Vocabulary
from tokenspeed.grammar.probe import probe
from tokenspeed.grammar.select import import_backend, open_backend
from tokenspeed.protocol.grammar import GrammarKind

MEMORY_BYTES = 2 << 30
"""What one compilation may take beyond what the process has."""

_HEADER = struct.Struct("<I")
_NICE = 10  # decoding goes first


class Setup(msgspec.Struct, frozen=True):
    """The first frame: library, vocabulary, options."""

    backend: str
    vocabulary: Vocabulary
    options: GrammarOptions


class Job(msgspec.Struct, frozen=True):
    """Every other frame: a grammar, and the CPU and wall-clock seconds it may take."""

    kind: GrammarKind
    text: str
    timeout_s: float


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`compiled`, or why there is none. `is_late`: it took more than its seconds."""

    compiled: bytes = b""
    error: str | None = None
    is_late: bool = False


def write_frame(pipe: BinaryIO, message: msgspec.Struct) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    pipe.write(_HEADER.pack(len(body)) + body)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes | None:
    """The next message's bytes, None when the other side is gone."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    body = pipe.read(length)
    return body if len(body) == length else None


def run_job(backend: Backend, vocabulary: Vocabulary, job: Job) -> Answer:
    """Compile in a fork and wait for it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _compile_here(backend, vocabulary, job, writer)
        finally:
            os._exit(1)  # no handler of the parent's may run twice
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        body = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return msgspec.msgpack.decode(body, type=Answer)
    return _death(status, job)


def _compile_here(backend: Backend, vocabulary: Vocabulary, job: Job, writer: int) -> None:
    """In the fork: limits, work, answer, exit."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job.timeout_s)
    cpu_s = math.ceil(job.timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    limit = _virtual_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        compiled = backend.compile(job.kind, job.text)
        probe(backend.load(compiled), vocabulary)
        answer = Answer(compiled)
    except GrammarError as error:
        answer = Answer(error=str(error))
    except MemoryError:
        answer = Answer(error=_TOO_LARGE)
    except RecursionError:
        answer = Answer(error="it is nested too deeply; flatten it")
    except Exception as error:  # whatever the library raises is about this grammar
        print(f"the grammar library failed: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
        answer = Answer(error="the grammar library failed on it, the server's log says how; simplify it")
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(answer))
    os._exit(0)


_TOO_LARGE = f"it needs more than {MEMORY_BYTES >> 30} GiB of memory to compile; make it smaller"


def _death(status: int, job: Job) -> Answer:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU):
        told = "make it smaller, or raise --grammar-compile-timeout-secs"
        return Answer(error=f"it was not compiled within {job.timeout_s:g} s; {told}", is_late=True)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGABRT, signal.SIGKILL):
        return Answer(error=_TOO_LARGE)
    return Answer(error="the grammar library crashed on it; simplify it")


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> int:
    """Serve jobs until stdin ends."""
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not reach the frames
    os.nice(_NICE)
    import_backend(sys.argv[1])  # while the engine still reads the vocabulary
    body = read_frame(inbox)
    if body is None:
        return 0
    setup = msgspec.msgpack.decode(body, type=Setup)
    backend = open_backend(setup.backend, setup.vocabulary, setup.options)
    decoder = msgspec.msgpack.Decoder(Job)
    write_frame(outbox, Answer())
    while (body := read_frame(inbox)) is not None:
        write_frame(outbox, run_job(backend, setup.vocabulary, decoder.decode(body)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
