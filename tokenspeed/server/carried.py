"""Reasoning in a form that a client keeps and sends back unread: `encrypted_content`, Anthropic's `signature`.

It is not secret and not signed: whoever owns the answer has the same text beside it. It only survives clients that drop
readable reasoning from the conversation they send back.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "tsr1."


def pack(text: str) -> str:
    """The carried form of reasoning."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unpack(carried: str) -> str | None:
    """The reasoning again, or None when this server did not write `carried`."""
    if not carried.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(carried.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
