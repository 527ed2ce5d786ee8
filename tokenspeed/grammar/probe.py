"""Follows a fresh grammar for a while, where it can be killed, to find out whether following it is cheap.

A grammar may compile at once and take seconds a token (ambiguous rules, nested repetitions). Steps of a batch would
wait for it, so it is refused instead. Costs are CPU time of this thread: a busy machine refuses no grammar.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenspeed.grammar.interface import CompiledGrammar, GrammarError, Vocabulary

MAX_TOKEN_S = 0.05
"""CPU seconds for one token: mask and acceptance. Usual grammars take 0.0001."""

NUM_TOKENS = 96
_Ids = NDArray[np.int64]
_Pick = Callable[[_Ids], int]


def probe(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Walk with a few habits: any token, the longest, always the same.

    Raises:
        GrammarError: a token took more than `MAX_TOKEN_S`, or there is a way into it that leads nowhere.
    """
    chance = random.Random(0)
    lengths = np.array([len(token) for token in vocabulary.tokens])
    is_end = np.zeros(len(lengths), dtype=bool)
    is_end[list(vocabulary.eos_token_ids)] = True
    favourite = -1

    def any_token(allowed: _Ids) -> int:
        return int(allowed[chance.randrange(len(allowed))])

    def longest(allowed: _Ids) -> int:
        return int(allowed[lengths[allowed].argmax()])

    def same(allowed: _Ids) -> int:
        nonlocal favourite
        if favourite not in allowed:
            favourite = any_token(allowed)
        return favourite

    for pick in (any_token, longest, same):
        _walk(compiled, is_end, pick)


def _walk(compiled: CompiledGrammar, is_end: NDArray[np.bool_], pick: _Pick) -> None:
    matcher, vocab_size = compiled.matcher(), len(is_end)
    row = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    for place in range(NUM_TOKENS):
        before_s = time.thread_time()
        if not matcher.fill(row):
            row[:] = -1
        spent_s = time.thread_time() - before_s
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
        allowed = np.flatnonzero(bits.astype(bool) & ~is_end)
        if not bits.any():
            raise GrammarError(
                f"nothing can come at token {place + 1}, and the output cannot end there; every rule needs an end"
            )
        if not len(allowed):
            return
        token_id = pick(allowed)
        before_s = time.thread_time()
        matcher.accept(token_id)
        spent_s += time.thread_time() - before_s
        if spent_s > MAX_TOKEN_S:
            raise GrammarError(
                f"it is too ambiguous or too large to follow: token {place + 1} took {spent_s * 1000:.0f} ms, the "
                f"limit is {MAX_TOKEN_S * 1000:.0f} ms; avoid nested repetitions and rules that match the same text in "
                "several ways"
            )
