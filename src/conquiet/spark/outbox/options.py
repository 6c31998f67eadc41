"""OutboxOptions: what a query may say about the outbox that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from conquiet.errors import ConfigError
from conquiet.events.source import TOPIC
from conquiet.events.table import EVENTS_TABLE
from conquiet.spark.address import Address
from conquiet.sql.log import Position
from conquiet.sql.tables import OUTBOX_TABLE, checked_name

EARLIEST, LATEST = "earliest", "latest"

OPTIONS = {
    "url": "where the database is: postgresql://USER@HOST/NAME or sqlite:////PATH/FILE",
    "urlFile": "instead of url: a file, on every host, that holds it",
    "urlEnv": "instead of url: an environment variable, on every host, that holds it",
    "table": f"name of the table ({OUTBOX_TABLE}); one named {EVENTS_TABLE} has domain events",
    "topic": "only rows of this topic; of domain events, which have none: the stream to name",
    "types": "only events of these types, with commas between",
    "since": "only rows created at this time or later, as 2026-01-31T00:00:00Z",
    "until": "only rows created before this time",
    "startingOffsets": "earliest, latest (of a stream) or a position such as 812-40017; reads"
    " behind it",
    "endingOffsets": "of a batch: latest, or the last position to read",
    "maxOffsetsPerTrigger": "of a stream: how many rows a micro-batch has at most; exact",
    "minPartitions": "into how many tasks a read is cut at least (1)",
    "failOnDataLoss": "of a stream: whether rows that cleanup took from a planned batch are an"
    " error (true) or a warning (false)",
    "dataType": "binary, or string if data is text",
    "schema": "DDL of JSON data; data is then a struct, as of the log",
    "delivery": "whether attributes tell of the relay: publishedat, attempts, lasterror (false)",
}
"""Every option and what it means; the table in the documentation is made of it."""


@dataclass(frozen=True)
class OutboxOptions:
    """The options of a query, checked."""

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
    fail_on_loss: bool = True
    delivery: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> OutboxOptions:
        known = {str(name).lower(): str(value) for name, value in given.items()}
        _refuse_unknown(known)
        table = known.get("table", OUTBOX_TABLE)
        checked_name(table)
        return cls(
            Address.of(known),
            table,
            known.get("topic"),
            tuple(filter(None, (name.strip() for name in known.get("types", "").split(",")))),
            _moment(known, "since"),
            _moment(known, "until"),
            _offset(known, "startingOffsets", EARLIEST),
            _offset(known, "endingOffsets", LATEST),
            _count(known, "maxOffsetsPerTrigger"),
            _count(known, "minPartitions") or 1,
            _switch(known, "failOnDataLoss", default=True),
            _switch(known, "delivery", default=False),
        )

    @property
    def has_domain_events(self) -> bool:
        """Whether the table is laid out as `outbox_events`: told by its name, as relays do."""
        return self.table.rpartition(".")[2] == EVENTS_TABLE

    @property
    def filters(self) -> bool:
        """Whether some rows are left out."""
        if self.topic is not None and not self.has_domain_events:
            return True
        return bool(self.types) or self.since is not None or self.until is not None

    @property
    def stream(self) -> str:
        """What domain events have in the column `stream`."""
        return self.topic or TOPIC


def _refuse_unknown(known: Mapping[str, str]) -> None:
    # Spark adds `path` for load(path); a misspelt filter would read too much without a word.
    wrong = set(known) - {name.lower() for name in OPTIONS} - {"path"}
    if wrong:
        raise ConfigError(
            f"conquiet-outbox knows no option {', '.join(sorted(wrong))};"
            f" it has {', '.join(OPTIONS)}"
        )


def _moment(known: Mapping[str, str], name: str) -> datetime | None:
    text = known.get(name.lower())
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r:.60}: write a time as 2026-01-31T00:00:00Z") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{name}={text!r:.60}: say in which zone, as 2026-01-31T00:00:00Z")
    return moment.astimezone(UTC)


def _offset(known: Mapping[str, str], name: str, default: str) -> str:
    text = known.get(name.lower(), default)
    if text not in (EARLIEST, LATEST):
        try:
            Position.parse(text)
        except ConfigError:
            raise ConfigError(
                f"{name}={text!r:.60}: write {EARLIEST}, {LATEST} or a position of the outbox's"
                " log, such as 812-40017"
            ) from None
    return text


def _count(known: Mapping[str, str], name: str) -> int | None:
    text = known.get(name.lower())
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}={text!r:.40}: write a whole number from 1 on")
    return int(text)


def _switch(known: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = known.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text!r:.40}: write true or false")
    return text == "true"
