"""Shape: what the fields of an entry mean, worked out once for all entries that have the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from conquiet.redis.entry import TOPIC_FIELD

ATTRIBUTE_COLUMNS = {
    "id": "event_id",
    "type": "type",
    "source": "source",
    "subject": "subject",
    "time": "time",
    "datacontenttype": "content_type",
}
"""Attributes that have a column of their own; all others are in the map `attributes`."""

QUEUED = (b"data",)
"""The fields of a message of `conquiet.queue`: one, with a JSON object."""

_attribute_name = re.compile(rb"[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Shape:
    """An event in binary mode, or a message of the queue: which field is which column."""

    kind: Literal["event", "queued"]
    columns: dict[str, int]
    """Column → place among the fields; `key` and `data` too, where there is one."""
    others: tuple[tuple[str, int], ...]
    """Attributes without a column, with their places."""
    version: int = -1
    """The place of `specversion`, whose value is still to be checked."""
    texts: dict[int, str] = field(default_factory=dict)
    """Places that must hold UTF-8, and the column that each is in, if any."""


@lru_cache(maxsize=1_000)
def shape_of(names: tuple[bytes, ...]) -> Shape | None:
    """The meaning of these fields; None if each such entry needs a look of its own."""
    if names == QUEUED:
        return Shape("queued", {"data": 0}, ())
    if b"specversion" not in names or len(set(names)) < len(names):
        return None
    columns: dict[str, int] = {}
    others: list[tuple[str, int]] = []
    for place, given in enumerate(names):
        if given.startswith(b":"):
            continue
        if not _attribute_name.fullmatch(given):
            return None
        name = given.decode()
        if name == "data":
            columns["data"] = place
        elif name in ATTRIBUTE_COLUMNS:
            columns[ATTRIBUTE_COLUMNS[name]] = place
        else:
            others.append((name, place))
    texts = {place: "attributes" for _, place in others}
    texts |= {place: name for name, place in columns.items() if name != "data"}
    if TOPIC_FIELD in names:
        texts[names.index(TOPIC_FIELD)] = ""
    return Shape("event", columns, tuple(others), names.index(b"specversion"), texts)
