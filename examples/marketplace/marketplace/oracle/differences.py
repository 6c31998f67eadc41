"""Differences: where somebody else's table is not what the oracle says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from marketplace.oracle.tables import table

Rows = Iterable[Mapping[str, Any]]


def differences(name: str, expected: Rows, found: Rows) -> Iterator[str]:
    """A line for each row that is missing, too many, there twice or different, by its key.

    >>> right = [{"hour": 1, "events": 2}, {"hour": 2, "events": 5}]
    >>> list(differences("outbox_delivery", right, [{"hour": 2, "events": 4}]))
    ['outbox_delivery hour=1: missing', 'outbox_delivery hour=2: events is 4, should be 5']

    Only columns that are expected are compared. Arrays count by their order.
    """
    key = table(name).key
    left = {tuple(row[column] for column in key): row for row in expected}
    seen: set[tuple[Any, ...]] = set()
    wrong: list[str] = []
    for row in found:
        identity = tuple(row[column] for column in key)
        place = " ".join(f"{column}={value}" for column, value in zip(key, identity, strict=True))
        if identity in seen:
            wrong.append(f"{name} {place}: there more than once")
            continue
        seen.add(identity)
        right = left.pop(identity, None)
        if right is None:
            wrong.append(f"{name} {place}: too many")
            continue
        said = [
            f"{column} is {row.get(column)!r}, should be {value!r}"
            for column, value in right.items()
            if row.get(column) != value
        ]
        if said:
            wrong.append(f"{name} {place}: {'; '.join(said)}")
    for identity in left:
        place = " ".join(f"{column}={value}" for column, value in zip(key, identity, strict=True))
        yield f"{name} {place}: missing"
    yield from wrong
