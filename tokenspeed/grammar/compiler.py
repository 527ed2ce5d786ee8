"""Compiles grammars beside the engine's loop and remembers them. No torch until a library is opened.

Owns the worker processes and the cache. The engine submits and takes futures; the runner asks for what is compiled.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import BinaryIO
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.interface import Backend, CompiledGrammar, GrammarError, GrammarOptions, Matcher, Vocabulary
from tokenspeed.grammar.lanes import Lanes, Ticket
from tokenspeed.grammar.select import KINDS, open_backend
from tokenspeed.grammar.worker import Answer, Job, Setup, read_frame, write_frame
from tokenspeed.protocol.errors import Overloaded
from tokenspeed.protocol.grammar import GrammarKind, GrammarSpec

logger = logging.getLogger(__name__)

NUM_WORKERS = 2
"""One of them for what is quick (see `lanes`). Started when needed; about 250 MB each, most of it shared pages of
libraries."""
CACHE_BYTES = 256 << 20
MAX_GRAMMAR_BYTES = 256 << 20  # of one, which its request keeps however full the cache is
REFUSAL_BYTES = 4 << 20  # of texts known to be bad, so that sending one again costs nothing
_START_TIMEOUT_S = 60.0
_GRACE_S = 10.0  # beyond its own alarm, then the whole worker is killed

_Key = tuple[str, str]


class _LateError(Exception):
    """The turn was too short."""


class GrammarCompiler:
    """See the module. `submit`, `forget` and `compiled` may be called from any thread.

    Args:
        backend: a name of `select.BACKENDS`.
        vocabulary: makes the vocabulary; called once, at the first grammar, on a thread of this object.
        timeout_s: what one compilation may take.
        cache_bytes: of compiled grammars that are kept for requests to come. The least recently used leave first; the
            newest stays in any case. A grammar that a request uses lives until that ends.
    """

    def __init__(
        self,
        backend: str,
        vocabulary: Callable[[], Vocabulary],
        options: GrammarOptions,
        timeout_s: float,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._name = backend
        self._make_vocabulary = vocabulary
        self._options = options
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: tuple[Vocabulary, Backend] | None = None
        self._running: dict[_Key, Ticket] = {}
        self._kept: OrderedDict[_Key, CompiledGrammar] = OrderedDict()  # least recently used first
        self._kept_bytes = 0
        self._alive: WeakValueDictionary[_Key, CompiledGrammar] = WeakValueDictionary()
        self._refused: OrderedDict[_Key, str] = OrderedDict()  # least recently asked for first
        self._refused_bytes = 0
        self._workers: dict[int, _Worker] = {}  # by thread
        self._is_closed = False
        self._lanes = Lanes(timeout_s)
        self._threads: list[threading.Thread] = []

    @property
    def kinds(self) -> tuple[GrammarKind, ...]:
        """What the library can do."""
        return KINDS[self._name]

    @property
    def num_grammars(self) -> int:
        """Grammars in this process's memory: those that are kept, and those that requests use."""
        return len(self._alive)

    @property
    def grammar_bytes(self) -> int:
        """What they take, roughly."""
        with self._lock:
            return sum(_bytes_of(key, compiled) for key, compiled in self._alive.items())

    def warm(self) -> None:
        """Open the library and start a worker now, in the background, so that no request waits for that. The worker,
        which has most of the work, gives way to whoever else wants a core."""
        with self._lock:
            if not self._threads and not self._is_closed:
                self._start_thread()

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The compiled grammar, perhaps at once. Fails with GrammarError. Whoever holds the result keeps it alive."""
        key = _key_of(spec)
        with self._lock:
            compiled = self._alive.get(key)
            if compiled is not None:
                self._keep(key, compiled)
                return _done(compiled)
            if key in self._refused:
                self._refused.move_to_end(key)
                return _failed(GrammarError(self._refused[key]))
            if key not in self._running:
                if self._is_closed:
                    raise RuntimeError("the engine is closing")
                ticket = self._running[key] = Ticket(spec)
                if len(self._threads) < min(len(self._running), NUM_WORKERS):
                    self._start_thread()
                self._lanes.put(ticket)
            self._running[key].is_wanted = True
            return self._running[key].future

    def forget(self, spec: GrammarSpec) -> None:
        """Nobody waits for this grammar any more: it gets no more turns."""
        key = _key_of(spec)
        with self._lock:
            ticket = self._running.get(key)
            if ticket is None:
                return
            ticket.is_wanted = False
            if self._lanes.leave(ticket):
                del self._running[key]
                _drop(ticket)

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """What `submit` has made, None when it is not there (any more)."""
        with self._lock:
            return self._alive.get(_key_of(spec))

    def fill_all(self, matchers: Sequence[Matcher], rows: NDArray[np.int32]) -> None:
        """See `Backend.fill_all`; the matchers are of grammars of this compiler."""
        assert self._opened is not None, "there are matchers"
        self._opened[1].fill_all(matchers, rows)

    def close(self) -> None:
        """End the workers; what still compiles fails."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers.values())
            for ticket in self._lanes.close():
                _drop(ticket)
        for worker in workers:
            worker.kill()

    def _start_thread(self) -> None:
        """The first takes only what is quick. The lock is held."""
        thread = threading.Thread(
            target=self._serve, args=(bool(self._threads),), name=f"grammar-{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve(self, takes_slow: bool) -> None:
        """A thread: one turn after the other."""
        try:
            self._ready_worker()
        except Exception as error:  # whoever needs it is told when trying again fails, too
            logger.warning("no process compiles grammars yet: %s", error)
        while (taken := self._lanes.take(takes_slow)) is not None:
            ticket, turn_s = taken
            if not ticket.num_turns:
                ticket.future.set_running_or_notify_cancel()
            try:
                compiled = self._first_taken(ticket.spec, turn_s)
            except _LateError:
                self._go_on(ticket, turn_s)
            except BaseException as error:
                self._end(ticket, error)
            else:
                self._end(ticket, compiled)

    def _go_on(self, ticket: Ticket, turn_s: float) -> None:
        """Another turn for it, if there is one and somebody waits."""
        error: BaseException = CancelledError()
        with self._lock:
            if ticket.is_wanted and not self._is_closed:
                try:
                    self._lanes.late(ticket, turn_s)
                    if ticket.is_slow and len(self._threads) < NUM_WORKERS:  # the first takes nothing slow
                        self._start_thread()
                    return
                except Overloaded as busy:
                    error = busy
            del self._running[_key_of(ticket.spec)]
        ticket.future.set_exception(error)

    def _end(self, ticket: Ticket, result: CompiledGrammar | BaseException) -> None:
        """What has become of it."""
        key = _key_of(ticket.spec)
        with self._lock:
            del self._running[key]
            if isinstance(result, GrammarError):
                self._refuse(key, str(result))
            elif not isinstance(result, BaseException):
                self._alive[key] = result
                self._keep(key, result)
        if isinstance(result, BaseException):
            ticket.future.set_exception(result)
        else:
            ticket.future.set_result(result)

    def _first_taken(self, spec: GrammarSpec, turn_s: float) -> CompiledGrammar:
        """Of the text and the looser ones. What is told when none is taken is about the text."""
        refused: GrammarError | None = None
        for text in (spec.text, *spec.looser):
            try:
                return self._compile_text(spec.kind, text, turn_s)
            except GrammarError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _compile_text(self, kind: GrammarKind, text: str, turn_s: float) -> CompiledGrammar:
        answer, backend = self._ask(kind, text, turn_s)
        if answer.is_late and turn_s < self._timeout_s:
            raise _LateError
        if answer.error is not None:
            raise GrammarError(answer.error)
        compiled = backend.load(answer.compiled)
        if compiled.num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"it takes {compiled.num_bytes >> 20} MiB of memory, the limit is {MAX_GRAMMAR_BYTES >> 20} MiB; "
                "make it smaller"
            )
        return compiled

    def _ask(self, kind: GrammarKind, text: str, turn_s: float) -> tuple[Answer, Backend]:
        worker, backend = self._ready_worker()
        answer = worker.ask(Job(kind, text, turn_s), turn_s + _GRACE_S)
        if answer is None:
            self._lose_worker(worker)
            answer = Answer(error="the process that compiles grammars died of it; simplify it")
        return answer, backend

    def _ready_worker(self) -> tuple[_Worker, Backend]:
        """This thread's worker, and the library in this process."""
        ident = threading.get_ident()
        worker, is_new = self._workers.get(ident), False
        if worker is None:
            with self._lock:
                if self._is_closed:
                    raise RuntimeError("the engine is closing")
                worker, is_new = _Worker(self._name), True  # it starts while this process opens the library
                self._workers[ident] = worker
        try:
            with self._opening:
                if self._opened is None:
                    vocabulary = self._make_vocabulary()
                    self._opened = vocabulary, open_backend(self._name, vocabulary, self._options)
                vocabulary, backend = self._opened
            if is_new:
                worker.begin(Setup(self._name, vocabulary, self._options))
        except BaseException:
            self._lose_worker(worker)
            raise
        return worker, backend

    def _lose_worker(self, worker: _Worker) -> None:
        """This thread's next turn starts another one."""
        worker.kill()
        with self._lock:
            self._workers.pop(threading.get_ident(), None)

    def _keep(self, key: _Key, compiled: CompiledGrammar) -> None:
        """Newest in the cache; drop the oldest beyond the limit. The lock is held."""
        if key not in self._kept:
            self._kept[key] = compiled
            self._kept_bytes += _bytes_of(key, compiled)
        self._kept.move_to_end(key)
        while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(*self._kept.popitem(last=False))

    def _refuse(self, key: _Key, why: str) -> None:
        """Remember a bad grammar; the lock is held."""
        self._refused[key] = why
        self._refused_bytes += len(key[1]) + len(why)
        while self._refused_bytes > REFUSAL_BYTES and len(self._refused) > 1:
            oldest, said = self._refused.popitem(last=False)
            self._refused_bytes -= len(oldest[1]) + len(said)


def _key_of(spec: GrammarSpec) -> _Key:
    return spec.kind, "\0".join((spec.text, *spec.looser))


def _bytes_of(key: _Key, compiled: CompiledGrammar) -> int:
    return compiled.num_bytes + len(key[1])


class _Worker:
    """The engine's end of one `worker` process, started at once."""

    def __init__(self, backend: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed.grammar.worker", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to be killed with what it has forked
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._stdout: BinaryIO = self._process.stdout  # type: ignore[assignment]

    def begin(self, setup: Setup) -> None:
        """Give it the vocabulary and wait until it can compile."""
        if self.ask(setup, _START_TIMEOUT_S) is None:
            self.kill()
            raise RuntimeError("the process that compiles grammars did not start; the log says why")

    def ask(self, message: Setup | Job, timeout_s: float) -> Answer | None:
        """Send and wait for the answer; None when it is late or the process is gone."""
        try:
            write_frame(self._stdin, message)
            if not select.select([self._stdout], [], [], timeout_s)[0]:
                return None
            body = read_frame(self._stdout)
        except (OSError, ValueError):  # ValueError: closed meanwhile
            return None
        return None if body is None else msgspec.msgpack.decode(body, type=Answer)

    def kill(self) -> None:
        """End it and what it has forked. A second call does nothing."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # another thread has ended and reaped it meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            try:
                pipe.close()
            except OSError:
                pass  # bytes that it had not taken


def _drop(ticket: Ticket) -> None:
    """Of a grammar that gets no more turns."""
    if not ticket.future.cancel():  # it has had one
        ticket.future.set_exception(CancelledError())


def _done(compiled: CompiledGrammar) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_result(compiled)
    return future


def _failed(error: GrammarError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    future.set_exception(error)
    return future
