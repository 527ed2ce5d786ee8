"""The formats of JSON schema as regular expressions, for strings that are not JSON. Each takes what is valid, or less.
No torch.

Sources: RFC 3339 (times and durations), 5321 and 1123 (mail, hosts), 4291 (IPv6), 3986 (URI), 6570 (templates), 6901
(pointers), 9562 (UUID). `date` and `date-time` are patterns already when a schema has been rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed.grammar.schema_types import TIME

_SECONDS = "[0-9]+S"
_MINUTES = f"[0-9]+M(?:{_SECONDS})?"
_CLOCK = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|{_SECONDS})"
_DAYS = "[0-9]+D"
_MONTHS = f"[0-9]+M(?:{_DAYS})?"
_DURATION = f"P(?:[0-9]+W|(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|{_DAYS})(?:{_CLOCK})?|{_CLOCK})"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
"""At most 4 labels: 255 characters are the limit of a whole name."""

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        *(f"(?:{_GROUP}:){{{before}}}(?::{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)),
        f":(?::{_GROUP}){{1,7}}",
        f"(?:{_GROUP}:){{1,7}}:",
        "::",
    )
)
_URI_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@\-]|%{_HEX}{{2}})"
_FIRST_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@\-]|%{_HEX}{{2}})"  # of a path that no scheme stands in front of
_BEHIND_PATH = rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_AUTHORITY = rf"//(?:{_HOST})(?::[0-9]{{1,5}})?(?:/{_URI_CHAR}*)*"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_AUTHORITY}|/?{_URI_CHAR}+(?:/{_URI_CHAR}*)*){_BEHIND_PATH}"
_RELATIVE = rf"(?:{_AUTHORITY}|/(?:{_URI_CHAR}+(?:/{_URI_CHAR}*)*)?|{_FIRST_CHAR}+(?:/{_URI_CHAR}*)*)?{_BEHIND_PATH}"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMAT_PATTERNS: Mapping[str, str] = {
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "time": TIME,
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": rf"(?:{_URI_CHAR}|[/?#]|{_EXPRESSION})*",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
"""By the name of a format: what the whole string matches."""

_ALNUM, _ATEXT = "[A-Za-z0-9]", r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]"
_SHORT_HOST = rf"{_ALNUM}{{1,30}}(?:[.\-]{_ALNUM}{{1,10}}){{0,3}}"
_SHORT_REST = r"[A-Za-z0-9._~!$&'()*+,;=:@/?\-]{0,128}"
_SHORT_URI = (
    r"[A-Za-z][A-Za-z0-9+.\-]{0,5}:"
    rf"(?://[A-Za-z0-9.\-]{{1,64}}(?::[0-9]{{1,5}})?(?:[/?]{_SHORT_REST})?|[A-Za-z0-9._~!$&'()*+,;=:@\-]{_SHORT_REST})"
)

SHORT_PATTERNS: Mapping[str, str] = {
    "email": rf"{_ATEXT}{{1,32}}(?:\.{_ATEXT}{{1,31}})?@{_SHORT_HOST}",
    "hostname": _SHORT_HOST,
    "uri": _SHORT_URI,
    "uri-reference": _SHORT_URI,
}
"""Less of some formats, with few and plain counts: what is left of them between lengths is still of use. The last part
of a URI is a path, a query or both; a `%` in it would need two characters behind it, so there is none."""

_LONG_REST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?\-]|%{_HEX}{{2}})"
_LONG_URI = (
    r"[A-Za-z][A-Za-z0-9+.\-]{0,5}:"
    rf"(?://[A-Za-z0-9.\-]{{1,64}}(?::[0-9]{{1,5}})?(?:[/?]{_LONG_REST}{{0,128}}(?:#{_LONG_REST}{{0,32}})?)?"
    rf"|[A-Za-z0-9._~!$&'()*+,;=:@\-]{_LONG_REST}{{0,128}})"
)

LONG_PATTERNS: Mapping[str, str] = {"uri": _LONG_URI, "uri-reference": _LONG_URI}
"""Of strings that have room: with `%`, and no longer than `LONG_CHARS`. Measured with xgrammar and 49k tokens: 1.2 s to
compile; the short one 0.4 s, one of any length 1.4 s."""

LONG_CHARS = 6 + 1 + 2 + 64 + 6 + 1 + 3 * 128 + 1 + 3 * 32
