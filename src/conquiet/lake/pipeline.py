"""Pipeline: definitions and a lake in one object; it runs, refreshes, replays and reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from conquiet.events.catalog import Catalog
from conquiet.lake.definition import Definitions


class Pipeline(Definitions):
    """What is made of events, and the lake that it is kept in."""

    def __init__(
        self,
        catalog: Catalog | None = None,
        *,
        lake: str | os.PathLike[str] = "lake",
        name: str = "pipeline",
        zone: str = "UTC",
        moments: Mapping[str, str] | None = None,
        typed: bool = True,
    ) -> None:
        super().__init__(catalog, name=name, zone=zone, moments=moments, typed=typed)
        self.lake = os.fspath(lake)

    def mart(
        self,
        name: str,
        *,
        of: type[msgspec.Struct] | str,
        by: Sequence[str],
        sums: Sequence[str] = (),
        counts: Mapping[str, str | None] | None = None,
        **more: Any,
    ) -> None:
        """Declare a table of sums and counts by some columns of a fact's table."""
        from conquiet.lake.query import mart

        source = of if isinstance(of, str) else self.definition.table_of(of).name
        self.queries.append(
            mart(self._new_name(name), of=source, by=by, sums=sums, counts=counts or {}, **more)
        )

    def query(self, name: str, *, sql: str, **more: Any) -> None:
        """Declare a table as SQL over tables of the lake, made again for the touched groups."""
        from conquiet.lake.query import Query

        self.queries.append(Query(self._new_name(name), sql=sql, **more))
