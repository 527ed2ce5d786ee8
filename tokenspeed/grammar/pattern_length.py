"""A regular expression whose matches have a length between two bounds, made of one that says nothing of it. No torch.

Counts are narrowed until every match fits, so all that is matched was matched before; some that would fit is not:

    [a-z]+(-[a-z]+)*   of at most 8   ->   [a-z]{1,4}(?:-[a-z]{1,3}){0,1}

Each part of a row gets its share of the room that the least lengths leave.
"""

from __future__ import annotations

import math

from tokenspeed.grammar.budget import Budget
from tokenspeed.grammar.interface import GrammarError
from tokenspeed.grammar.name_pattern import Char, Edge, Either, Node, Repeat, Row, read_pattern
from tokenspeed.grammar.patterns import MAX_CHARS

MAX_COUNT = 128
"""Of one part: see `schema_strings.MAX_HELD_LEN`."""

MAX_PARTS = 500
"""That are looked at: rows inside rows multiply the ways."""

MAX_CARRIERS = 3
"""Parts of a row that are tried, one at a time, for what is missing of the least length."""

_SPECIAL = frozenset(".^$*+?()[]{}|\\/")


def within(pattern: str, low: int, high: int | None) -> str | None:
    """The narrower pattern, of whole strings; None where this way finds none.

    Args:
        pattern: one that `check_pattern` has let through; it matches as a whole.
        high: None = no most length.

    Raises:
        GrammarError: see `name_pattern.NamePattern`.
    """
    tree = read_pattern(pattern)
    least, most = _lengths(tree)
    room = math.inf if high is None else high
    if least > room or most < low:
        return None
    try:
        narrowed = _narrowed(tree, low, room, Budget(MAX_PARTS))
    except GrammarError:
        return None
    text = None if narrowed is None else _text(narrowed)
    return text if text is not None and len(text) <= MAX_CHARS else None


def lengths_of(pattern: str) -> tuple[int, float]:
    """The least and the most characters of a match; inf: no most.

    Raises:
        GrammarError: see `name_pattern.NamePattern`.
    """
    return _lengths(read_pattern(pattern))


def _lengths(node: Node) -> tuple[int, float]:
    """The least and the most characters of a match."""
    match node:
        case Char():
            return 1, 1
        case Edge():
            return 0, 0
        case Row(parts):
            lengths = [_lengths(part) for part in parts]
            return sum(low for low, _ in lengths), sum(high for _, high in lengths)
        case Either(options):
            lengths = [_lengths(option) for option in options]
            return min(low for low, _ in lengths), max(high for _, high in lengths)
        case Repeat(part, times_low, times_high):
            low, high = _lengths(part)
            most = math.inf if times_high is None else float(times_high)
            return low * times_low, high * most if high and most else 0.0


def _narrowed(node: Node, low: int, high: float, budget: Budget) -> Node | None:
    """What of a part has a length between the bounds; None where there is nothing, or no way is known."""
    budget.spend(1)
    least, most = _lengths(node)
    if low <= least and most <= high:
        return node
    if least > high or most < low:
        return None
    match node:
        case Row(parts):
            return _row(parts, low, high, budget)
        case Either(options):
            kept = [each for option in options if (each := _narrowed(option, low, high, budget)) is not None]
            return None if not kept else kept[0] if len(kept) == 1 else Either(tuple(kept))
        case Repeat():
            return _repeated(node, low, high, budget)
    return None


def _row(parts: tuple[Node, ...], low: int, high: float, budget: Budget) -> Node | None:
    """One part takes what is missing of the least length: each that can, as alternatives."""
    lengths = [_lengths(part) for part in parts]
    mosts = _shared(lengths, high)
    leasts = [least for least, _ in lengths]
    need = low - sum(leasts)
    if need <= 0:
        return _row_of(parts, leasts, mosts, budget)
    able = [place for place in range(len(parts)) if mosts[place] - leasts[place] >= need][:MAX_CARRIERS]
    rows = []
    for place in able:
        row = _row_of(parts, [least + need * (at == place) for at, least in enumerate(leasts)], mosts, budget)
        if row is not None:
            rows.append(row)
    if not able:  # several take what they can, the first ones most
        for place in range(len(parts)):
            more = max(0, min(need, int(mosts[place]) - leasts[place]))
            leasts[place] += more
            need -= more
        return None if need > 0 else _row_of(parts, leasts, mosts, budget)
    return None if not rows else rows[0] if len(rows) == 1 else Either(tuple(rows))


def _row_of(parts: tuple[Node, ...], leasts: list[int], mosts: list[float], budget: Budget) -> Node | None:
    done = [_narrowed(part, least, most, budget) for part, least, most in zip(parts, leasts, mosts, strict=True)]
    known = tuple(part for part in done if part is not None)
    return Row(known) if len(known) == len(done) else None


def _shared(lengths: list[tuple[int, float]], high: float) -> list[float]:
    """The most characters of each part: those that want less than an equal share of the room leave the rest."""
    mosts = [float(least) for least, _ in lengths]
    room = high - sum(mosts)
    waiting = sorted(range(len(lengths)), key=lambda at: lengths[at][1] - lengths[at][0])
    for place, at in enumerate(waiting):
        wanted = lengths[at][1] - lengths[at][0]
        share = min(wanted, room if math.isinf(room) else room // (len(waiting) - place))
        mosts[at] += share
        room -= 0 if math.isinf(room) else share
    return mosts


def _repeated(node: Repeat, low: int, high: float, budget: Budget) -> Node | None:
    part, times_low, times_high = node.part, node.low, node.high
    least, most = _lengths(part)
    if most > high or (math.isinf(most) and not math.isinf(high)) or most * times_low > high:
        # Some repetitions of a shorter part, rather than one of a long one.
        times = max(times_low, min(4, int(high) // max(1, least), 4 if times_high is None else times_high), 1)
        shorter = _narrowed(part, least, high // times, budget)
        if shorter is None:
            return None
        part, (least, most) = shorter, _lengths(shorter)
    if most and not math.isinf(high):
        fits = int(high // most)
        if most == 1 and fits > MAX_COUNT and times_high is None:
            fits = max(MAX_COUNT, low)
        times_high = fits if times_high is None else min(times_high, fits)
    if low > least * times_low:
        if not least and times_high is None:  # none of them is empty
            filled = _narrowed(part, 1, most, budget)
            if filled is None:
                return None
            part, least = filled, 1
        if least and (times_high is None or math.ceil(low / least) <= times_high):
            times_low = math.ceil(low / least)
        elif times_high:  # as often as can be, each time longer
            longer = _narrowed(part, math.ceil(low / times_high), most, budget)
            if longer is None:
                return None
            part, times_low = longer, times_high
    if times_high is not None and times_low > times_high:
        return None
    return Repeat(part, times_low, times_high)


def _text(node: Node) -> str:
    match node:
        case Char(accepts):
            return _char(accepts.pattern)
        case Edge():
            return ""
        case Row(parts):
            return "".join(f"(?:{_text(part)})" if isinstance(part, Either) else _text(part) for part in parts)
        case Either(options):
            return "|".join(map(_text, options))
        case Repeat(part, low, high):
            if high == 0:
                return ""
            inner = _text(part)
            return (inner if isinstance(part, Char) else f"(?:{inner})") + _count(low, high)


def _count(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((low, high))
    if short is not None:
        return short
    return f"{{{low},}}" if high is None else f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _char(source: str) -> str:
    """As a library reads it: Python escapes more than is special."""
    if len(source) == 2 and source[0] == "\\" and not source[1].isalnum():
        return source if source[1] in _SPECIAL else source[1]
    return source
