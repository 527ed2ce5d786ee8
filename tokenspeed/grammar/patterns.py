"""What a regular expression may hold: a scan, without a library, that says no in the user's words.

A library may skip what it does not know (a look-ahead, an anchor in the middle) or follow it so slowly that a batch
stands still (repetitions inside repetitions); both are refused here, in the server. No torch.
"""

from __future__ import annotations

import re

from tokenspeed.grammar.interface import GrammarError

MAX_CHARS = 4096
MAX_COPIES = 10_000
"""Copies of one character that counted repetitions, multiplied, may ask for."""

MAX_GROUPS = 64
"""Groups inside groups. Readers of a pattern go down with them."""

_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_NO_LEAST = re.compile(r"\{,\d*\}")  # a count to some engines, text to others
_LONG_ESCAPE = re.compile(r"\\[uxpP]\{[^}]*\}")
_SURROGATE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2}|[\ud800-\udfff])"
    r"|\\.",
    re.DOTALL,
)
_GROUPS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?>": "atomic group",
    "(?(": "condition",
    "(?#": "comment",
}
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_]\w*>")


def check_pattern(pattern: str) -> str:
    """Check an expression that has to match as a whole, and take off the anchors, which change nothing then.

    Returns:
        The expression without `^` in front of and `$` behind its alternatives; of groups, `?` and counts without a
        most are written in another way (see `_Scan._group_repeat`).

    Raises:
        GrammarError: what cannot be used, and where.
    """
    if len(pattern) > MAX_CHARS:
        raise GrammarError(f"the regular expression has {len(pattern)} characters, the limit is {MAX_CHARS}")
    scan = _Scan(joined(pattern))
    scan.run()
    if scan.max_copies > MAX_COPIES:
        raise GrammarError(
            f"the regular expression repeats something up to {scan.max_copies} times (counts inside counts are "
            f"multiplied), the limit is {MAX_COPIES}; use smaller counts, or * and +"
        )
    return "".join(scan.kept)


def joined(pattern: str) -> str:
    """The expression with the character itself in place of the two `\\u` that are its halves.

    Raises:
        GrammarError: half a character stands alone: text has none.
    """

    def one(found: re.Match[str]) -> str:
        if found[3]:
            half = found[3].encode("ascii", "backslashreplace").decode()
            raise GrammarError(f"the regular expression holds half a character, {half} at {found.start()}")
        if not found[1]:
            return found[0]
        return chr(0x10000 + ((int(found[1], 16) & 0x3FF) << 10 | int(found[2], 16) & 0x3FF))

    return _SURROGATE.sub(one, pattern)


class _Scan:
    """One pass from left to right. `_sizes` holds, a group, how many copies its content is worth so far."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._sizes: list[int] = [1]
        self._last = 1  # copies of the item that a repetition would repeat
        self._can_repeat = False  # what stands in front of a repetition is an item
        self._group: int | None = None  # where in `kept` it begins, when it is a group
        self._begins: list[int] = []  # of the groups that are open
        self.max_copies = 1
        self.kept: list[str] = []

    def run(self) -> None:
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            match char:
                case "\\":
                    self._escape()
                case "[":
                    self._take(self._class_end())
                    self._item(1)
                case "(":
                    self._open()
                case ")":
                    self._close()
                case "^" | "$":
                    self._anchor(char)
                case "{":
                    self._brace()
                case "*" | "+" | "?":
                    self._repeat(self._at + 1)
                case "|":
                    self._take(self._at + 1)
                    self._can_repeat = False
                case _:
                    self._take(self._at + 1)
                    self._item(1)
        if len(self._sizes) > 1:
            raise GrammarError("the regular expression has a ( without its )")

    def _take(self, end: int) -> None:
        self.kept.append(self._pattern[self._at : end])
        self._at = end

    def _item(self, copies: int) -> None:
        self._group = None
        self._last = copies
        self._can_repeat = True
        self._sizes[-1] = max(self._sizes[-1], copies)
        self.max_copies = max(self.max_copies, copies)

    def _escape(self) -> None:
        following = self._pattern[self._at + 1 : self._at + 2]
        if following in ("b", "B", "A", "Z", "z", "G"):
            raise GrammarError(f"the regular expression holds \\{following} at {self._at}, which is not supported")
        if following.isdigit() and following != "0":
            raise GrammarError(f"the regular expression holds the back reference \\{following}, which is not supported")
        if not following:
            raise GrammarError("the regular expression ends in a single backslash")
        long = _LONG_ESCAPE.match(self._pattern, self._at)
        self._take(long.end() if long else self._at + 2)
        self._item(1)

    def _class_end(self) -> int:
        at = self._at + 1
        if self._pattern[at : at + 1] == "^":
            at += 1
        if self._pattern[at : at + 1] == "]":
            at += 1
        while at < len(self._pattern) and self._pattern[at] != "]":
            at += 2 if self._pattern[at] == "\\" else 1
        if at >= len(self._pattern):
            raise GrammarError("the regular expression has a [ without its ]")
        return at + 1

    def _open(self) -> None:
        rest = self._pattern[self._at : self._at + 4]
        self._begins.append(len(self.kept))
        for start, what in _GROUPS.items():
            if rest.startswith(start):
                raise GrammarError(f"the regular expression holds {start} ({what}) at {self._at}; it is not supported")
        if rest.startswith("(?:"):
            self._take(self._at + 3)
        elif named := _NAMED_GROUP.match(self._pattern, self._at):
            self.kept.append("(")
            self._at = named.end()
        elif rest.startswith("(?"):
            raise GrammarError(f"the regular expression holds {rest[:3]} at {self._at}; flags are not supported")
        else:
            self._take(self._at + 1)
        self._sizes.append(1)
        self._can_repeat = False
        if len(self._sizes) > MAX_GROUPS + 1:
            raise GrammarError(f"the regular expression has groups inside groups, more than {MAX_GROUPS} deep")

    def _close(self) -> None:
        if len(self._sizes) == 1:
            raise GrammarError("the regular expression has a ) without its (")
        self._take(self._at + 1)
        self._item(self._sizes.pop())
        self._group = self._begins.pop()

    def _anchor(self, char: str) -> None:
        before = self._pattern[self._at - 1 : self._at]
        after = self._pattern[self._at + 1 : self._at + 2]
        is_outer = len(self._sizes) == 1 and (before in ("", "|") if char == "^" else after in ("", "|"))
        if not is_outer:
            raise GrammarError(f"the regular expression holds {char} at {self._at}, inside of it; it is not supported")
        self._at += 1
        self._can_repeat = False

    def _brace(self) -> None:
        if found := _COUNT.match(self._pattern, self._at):
            self._count(found)
        elif found := _NO_LEAST.match(self._pattern, self._at):
            raise GrammarError(
                f"the regular expression holds {found[0]} at {self._at}, a count without a least number, which some "
                f"engines take for text; write {{0{found[0][1:]} or \\{found[0]}"
            )
        else:  # text; libraries want it escaped
            self.kept.append("\\{")
            self._at += 1
            self._item(1)

    def _count(self, found: re.Match[str]) -> None:
        if found[3] and int(found[1]) > int(found[3]):
            raise GrammarError(f"the regular expression holds {found[0]} at {self._at}: {found[1]} is above {found[3]}")
        copies = self._last
        self._repeat(found.end())
        # The largest count decides; an open end repeats one copy over and over.
        times = int(found[3] or found[1])
        self._item(copies * max(times, 1))
        self._can_repeat = False

    def _repeat(self, end: int) -> None:
        """A repetition that ends at `end`, with the `?` that makes it lazy."""
        if not self._can_repeat:
            what = self._pattern[self._at : end]
            raise GrammarError(
                f"the regular expression repeats nothing with the {what} at {self._at}; one repetition behind another "
                "needs a group"
            )
        what = self._pattern[self._at : end]
        self._take(end + self._pattern.startswith("?", end))
        if self._group is not None:
            self.kept[-1] = self._group_repeat(what, "".join(self.kept[self._group : -1])) or self.kept[-1]
        self._can_repeat = False

    @staticmethod
    def _group_repeat(what: str, group: str) -> str | None:
        """What xgrammar 0.2.9 takes wrongly, in words that mean the same; None = nothing. It takes `1(a1*)?` for
        `1a?1*` (a fourth digit in `^\\d{1,3}(\\.\\d{1,2})?$`), and lets `(a1{1,2}|1a){1,}` end behind `1a1`."""
        found = _COUNT.fullmatch(what)
        if what == "?":
            return "{0,1}"
        if found is None or not found[2] or found[3]:
            return None
        least = int(found[1])
        if least > 1 and len(group) > MAX_CHARS // 2:  # groups inside groups are doubled again and again
            raise GrammarError(
                f"the regular expression repeats a group of {len(group)} characters at least {least} times"
            )
        return ("*", "+")[least] if least < 2 else f"{{{least}}}{group}*"
