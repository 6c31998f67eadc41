"""Entry ids: the two numbers of `1700000000000-7`, their order and their neighbours.

Functions that return an id return the kind of text that they were given, bytes or str. Neighbours
are computed because ranges that exclude an end (`(5-7`) need Redis 6.2.
"""

from __future__ import annotations

import re
from typing import AnyStr

FIRST, LAST = b"-", b"+"
"""The ends of a stream, as arguments of XRANGE and XPENDING."""

LARGEST = 2**64 - 1
"""The largest value of either number of an id."""

MIN = b"0-0"
"""Below every entry: Redis gives no entry this id."""

MAX = b"%d-%d" % (LARGEST, LARGEST)
"""The largest possible id; a stream that holds it can take no more entries."""

_id = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


def parse(entry_id: bytes | str) -> tuple[int, int]:
    """Return milliseconds and sequence, which compare as ids do; a missing sequence is 0.

    >>> parse(b"1700000000000-7") < parse("1700000000000-12")
    True
    """
    if isinstance(entry_id, bytes):
        milliseconds, _, sequence = entry_id.partition(b"-")
        return int(milliseconds), int(sequence or 0)
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)


def format(milliseconds: int, sequence: int = 0) -> str:
    """Return the id of two numbers.

    >>> format(1700000000000, 7)
    '1700000000000-7'
    """
    return f"{milliseconds}-{sequence}"


def next_after(entry_id: AnyStr) -> AnyStr:
    """Return the smallest id above the given one.

    >>> next_after(b"5-7"), next_after("5-18446744073709551615")
    (b'5-8', '6-0')
    """
    milliseconds, sequence = parse(entry_id)
    if sequence == LARGEST:
        return _like(entry_id, milliseconds + 1, 0)
    return _like(entry_id, milliseconds, sequence + 1)


def before(entry_id: AnyStr) -> AnyStr:
    """Return the largest id below the given one; `0-0` has none and is returned itself.

    >>> before(b"5-7"), before("5-0"), before("0-0")
    (b'5-6', '4-18446744073709551615', '0-0')
    """
    milliseconds, sequence = parse(entry_id)
    if sequence:
        return _like(entry_id, milliseconds, sequence - 1)
    if milliseconds:
        return _like(entry_id, milliseconds - 1, LARGEST)
    return _like(entry_id, 0, 0)


def is_valid(text: str) -> bool:
    """Return whether a text is an entry id, with or without a sequence, that Redis would accept.

    >>> is_valid("1700000000000-0"), is_valid("1700000000000"), is_valid("$"), is_valid("1-2-3")
    (True, True, False, False)
    """
    return bool(_id.fullmatch(text)) and max(parse(text)) <= LARGEST


def _like(entry_id: AnyStr, milliseconds: int, sequence: int) -> AnyStr:
    if isinstance(entry_id, bytes):
        return b"%d-%d" % (milliseconds, sequence)
    return f"{milliseconds}-{sequence}"
