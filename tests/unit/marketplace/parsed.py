"""Generated entries as a reader sees them: JSON, and nothing of the generator's own state."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from marketplace.generator import Entry, Generator


def world(faults: Any = (), *, seed: int = 3, orders: int = 60, **settings: Any) -> list[Entry]:
    return list(Generator(seed=seed, faults=faults, orders=orders, **settings).entries())


def data(entry: Entry) -> dict[str, Any]:
    return json.loads(entry.data)["data"]


def by_order(entries: Iterable[Entry]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The events of each order, in the order in which they happened."""
    found = defaultdict(list)
    for entry in entries:
        if entry.is_telemetry or entry.delivery > 1:
            continue
        content = data(entry)
        if "order_id" in content:
            at = datetime.fromisoformat(entry.time)
            found[content["order_id"]].append((at, entry.event_id, entry.type, content))
    return {
        order: [(kind, content) for _, _, kind, content in sorted(events)]
        for order, events in found.items()
    }
