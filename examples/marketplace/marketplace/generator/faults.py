"""The faults of a log, by name, and how frequent they are."""

from __future__ import annotations

from collections.abc import Iterable

from conquiet.errors import ConfigError

FAULTS = {
    "duplicates": 0.01,
    "out_of_order": 0.01,
    "late": 0.005,
    "partial_acceptance": 0.15,
    "click_without_impression": 0.05,
    "rollup_revisions": 0.30,
    "unknown_type": 0.001,
    "unknown_version": 0.001,
    "null_data": 0.001,
    "invalid_data": 0.0005,
    "broken_json": 0.0005,
    "wrong_amounts": 0.02,
    "text": 0.02,
    "crash": 0.0005,
}
"""The share of events, orders, clicks or rollups that have the fault.

duplicates                an event is published twice or three times; a token is sent by two events
out_of_order              an event is published seconds to minutes after its successors
late                      … hours to 11 days after it happened
partial_acceptance        a vendor rejects some lines of an order
click_without_impression  the impression of a click never arrives
rollup_revisions          a day of an ad is counted again, and differently
unknown_type, _version    a newer producer
null_data                 `data` is null
invalid_data              `data` lacks required fields
broken_json               an entry that was cut off
wrong_amounts             an order does not add up; a collection or a payout is off
text                      NUL and multi-byte characters in titles
crash                     a relay dies between publish and mark: its batch is published again
"""


def faults_of(names: str | Iterable[str]) -> frozenset[str]:
    """Check names of faults; `"all"` and `"none"` are names too.

    >>> sorted(faults_of(["late", "duplicates"]))
    ['duplicates', 'late']
    """
    if isinstance(names, str):
        names = {"all": list(FAULTS), "none": []}.get(names, [names])
    chosen = frozenset(names)
    unknown = ", ".join(sorted(chosen - FAULTS.keys()))
    if unknown:
        raise ConfigError(f"no such fault: {unknown}; there are {', '.join(FAULTS)}")
    return chosen


def thresholds(
    names: tuple[str, ...], faults: frozenset[str]
) -> tuple[list[tuple[float, str]], float]:
    """Return the range of a draw between 0 and 1 for each fault that is on, and for any of them."""
    found, total = [], 0.0
    for name in names:
        if name in faults:
            total += FAULTS[name]
            found.append((total, name))
    return found, total


def pick(limits: list[tuple[float, str]], draw: float) -> str:
    return next(name for limit, name in limits if draw < limit)
