"""Options of the format `conquiet-outbox`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from conquiet.config import EVENTS_TABLE, has_events_layout
from conquiet.errors import ConfigError
from conquiet.events.source import TOPIC
from conquiet.spark.options import (
    DATABASE,
    SET_BY_SPARK,
    URL_ENV,
    URL_FILE,
    Address,
    Option,
    Options,
)
from conquiet.sql.log import Position
from conquiet.sql.schema import OUTBOX_TABLE, split_name

EARLIEST, LATEST = "earliest", "latest"

OUTBOX_OPTIONS = {
    "url": Option("", f"where the database is: {DATABASE[1]}"),
    "urlFile": URL_FILE,
    "urlEnv": URL_ENV,
    "table": Option(
        OUTBOX_TABLE, f"name of the table; one named `{EVENTS_TABLE}` has domain events"
    ),
    "topic": Option(
        "", "only rows of this topic; of domain events, which have none: the stream to name"
    ),
    "types": Option("", "by commas: only events of these types"),
    "since": Option("", "only rows created at this time or later, as 2026-01-31T00:00:00Z"),
    "until": Option("", "only rows created before this time"),
    "startingOffsets": Option(
        EARLIEST,
        "`earliest`, `latest` (of a stream) or a position such as 812-40017; reads the rows after"
        " it",
    ),
    "endingOffsets": Option(LATEST, "batch only; `latest`, or the last position to read"),
    "maxOffsetsPerTrigger": Option("none", "rows per micro-batch, exactly"),
    "minPartitions": Option("1", "tasks at least"),
    "failOnDataLoss": Option(
        "true",
        "stream only: fail when cleanup took rows of a planned batch; else warn and count",
    ),
    "dataType": Option("binary", "`string` if data is text"),
    "schema": Option("", "DDL of JSON data; `data` is then a struct, as of the log"),
    "delivery": Option("false", "add attributes of the relay: publishedat, attempts, lasterror"),
}


@dataclass(frozen=True)
class OutboxOptions:
    """The checked options of a query; can be pickled."""

    address: Address
    table: str = OUTBOX_TABLE
    topic: str | None = None
    types: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    starting: str = EARLIEST
    ending: str = LATEST
    max_rows: int | None = None
    min_partitions: int = 1
    fail_on_data_loss: bool = True
    delivery: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> OutboxOptions:
        options = Options(
            given, OUTBOX_OPTIONS, "the format 'conquiet-outbox'", ignored=SET_BY_SPARK
        )
        table = options.text("table") or OUTBOX_TABLE
        split_name(table)
        return cls(
            address=options.address(*DATABASE),
            table=table,
            topic=options.text("topic"),
            types=options.names("types"),
            since=options.moment("since"),
            until=options.moment("until"),
            starting=_offset(options, "startingOffsets", EARLIEST),
            ending=_offset(options, "endingOffsets", LATEST),
            max_rows=options.whole("maxOffsetsPerTrigger"),
            min_partitions=options.whole("minPartitions") or 1,
            fail_on_data_loss=options.flag("failOnDataLoss", True),
            delivery=options.flag("delivery", False),
        )

    @property
    def has_domain_events(self) -> bool:
        """Return whether the table has the layout of `outbox_events`."""
        return has_events_layout(self.table)

    @property
    def filters(self) -> bool:
        """Return whether some rows are left out."""
        if self.topic is not None and not self.has_domain_events:
            return True
        return bool(self.types) or self.since is not None or self.until is not None

    @property
    def stream(self) -> str:
        """The value of the column `stream` for domain events."""
        return self.topic or TOPIC


def _offset(options: Options, name: str, default: str) -> str:
    text = options.text(name) or default
    if text not in (EARLIEST, LATEST):
        try:
            Position.parse(text)
        except ConfigError:
            raise ConfigError(
                f"{name}={text!r:.60}: write {EARLIEST}, {LATEST} or a position of the outbox's"
                " log, such as 812-40017"
            ) from None
    return text
