"""Piece: a range of one stream; a task reads several of them. And ids, which are its ends."""

from __future__ import annotations

from typing import NamedTuple

BEGINNING = "0-0"
"""Before every entry: no entry has this id."""

LARGEST = 2**64 - 1
"""Of the two numbers of an id, each."""


class Piece(NamedTuple):
    """The entries of a stream after one id and up to another."""

    stream: str
    after: str
    """Not part of it; `0-0` for the beginning."""
    until: str
    entries: int | None = None
    """How many there should be, where that is known."""
    first: str | None = None
    """Where it is not: the first of them, which must be there until all are read."""
    at_most: int | None = None
    """Where it is not: how many entries its whole stream has."""


def parts(entry_id: str) -> tuple[int, int]:
    """An entry id as numbers, which compare as ids do.

    >>> parts("1700000000000-7") < parts("1700000000000-12")
    True
    """
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def id_of(milliseconds: int, sequence: int = 0) -> str:
    return f"{milliseconds}-{sequence}"


def before(entry_id: str) -> str:
    """The largest id below.

    >>> before("5-7"), before("5-0"), before("0-0")
    ('5-6', '4-18446744073709551615', '0-0')
    """
    milliseconds, sequence = parts(entry_id)
    if sequence:
        return id_of(milliseconds, sequence - 1)
    return id_of(milliseconds - 1, LARGEST) if milliseconds else BEGINNING
