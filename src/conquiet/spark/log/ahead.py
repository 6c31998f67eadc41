"""Ahead: where the next micro-batch ends is looked for while this one is read.

To find the end of a batch that is limited, its entries are walked through inside Redis, which takes
about as long as it takes to read them; and nobody else works meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread

from conquiet.redis.wire import Wire
from conquiet.spark.log.limiting import Limited, limited
from conquiet.spark.log.offsets import Position
from conquiet.spark.log.piece import parts

Positions = Mapping[str, Position]


class Ahead:
    """One look ahead, from where a batch ends, in a thread that nobody has to wait for."""

    def __init__(self, wire: Wire, starts: Positions, ends: Positions, limit: int) -> None:
        self._asked = (starts, ends, limit)
        self._found: Limited | None = None
        self._thread = Thread(target=self._look, args=(wire,), daemon=True)
        self._thread.start()

    def _look(self, wire: Wire) -> None:
        try:
            self._found = limited(wire, *self._asked)
        except Exception:  # noqa: BLE001 - who needs it looks again, and tells what is wrong
            self._found = None

    def found(self, starts: Positions, ends: Positions, limit: int) -> Limited | None:
        """What was found, unless the question is another by now, or there is more to be had."""
        self._thread.join()
        there, then, least = self._asked
        if self._found is None or limit != least or self._found.ends == then:
            return None
        is_same = _places(starts) == _places(there) and then.keys() == ends.keys()
        if not is_same or any(parts(ends[name].id) < parts(then[name].id) for name in then):
            return None
        return self._found


def _places(positions: Positions) -> dict[str, tuple[str, int | None]]:
    """A trim beyond a place changes how many entries are known to lie before it."""
    return {name: (at.id, at.added) for name, at in positions.items()}
