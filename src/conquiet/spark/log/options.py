"""Options of the format `conquiet`, for reading and writing; reading uses the names of Kafka's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads

from conquiet.errors import ConfigError
from conquiet.redis.topic import Topic
from conquiet.spark.log.offsets import Bounds
from conquiet.spark.options import SET_BY_SPARK, URL_ENV, URL_FILE, Address, Option, Options

_REDIS = "Redis", "redis://host:6379/0"
_DAY_SECONDS = 24 * 60 * 60

MAX_BYTES_PER_BATCH = 32 << 20
"""Small enough for a dozen tasks in a driver with a heap of 1 GB."""
_LARGEST_BATCH = 1 << 30
"""Offsets in a batch have 32 bits, and text in base64 is a third longer than its bytes."""

READ_OPTIONS = {
    "url": Option(
        "",
        "where Redis is: `redis://`, `rediss://`, `unix://`, `redis+cluster://`,"
        " `redis+sentinel://`",
    ),
    "urlFile": URL_FILE,
    "urlEnv": URL_ENV,
    "streams": Option("", "names and patterns (`events:*`), by commas or as a JSON list"),
    "startingOffsets": Option(
        "latest; in a batch earliest",
        "`earliest`, `latest`, a time (ISO 8601), or JSON with an id, a time or one of these"
        " words per stream; the entry with that id is read",
    ),
    "startingTimestamp": Option("", "milliseconds since 1970, for all streams"),
    "endingOffsets": Option("latest", "batch only; the entry with that id is not read"),
    "endingTimestamp": Option("", "batch only; milliseconds since 1970, for all streams"),
    "maxOffsetsPerTrigger": Option("none", "entries per micro-batch, exactly, over all streams"),
    "minPartitions": Option("none", "tasks at least, even if they are small"),
    "maxRecordsPerPartition": Option("2000000", "about how many entries a task reads at most"),
    "maxBytesPerBatch": Option(
        str(MAX_BYTES_PER_BATCH),
        "about how many bytes a reply of Redis and an Arrow batch have at most; a larger entry is a"
        " row with `_malformed` and without its data",
    ),
    "failOnDataLoss": Option(
        "true",
        "fail when entries are gone before they were read; else warn and count",
    ),
    "readerName": Option("none", "registers the position, so that trimming keeps unread entries"),
    "mirrorGroup": Option(
        "none", "a group whose lag in XINFO GROUPS shows that of the query (Redis 7)"
    ),
    "discoverySeconds": Option("5", "how often patterns are looked up again"),
    "dataType": Option("binary", "`string` if data is text"),
    "schema": Option("", "DDL of JSON data; `data` is then a struct"),
    "types": Option(
        "", "by commas: events of other types are left out, before their data is parsed"
    ),
}

WRITE_OPTIONS = {
    "url": Option("", "where Redis is, as for reading; or `urlFile`, or `urlEnv`"),
    "urlFile": URL_FILE,
    "urlEnv": URL_ENV,
    "topic": Option("", "where events go; else the column `topic`, else the column `stream`"),
    "partitions": Option("1", "streams of a topic, among which the key of an event chooses"),
    "source": Option("", "for rows that have no `source`"),
    "type": Option("", "for rows that have no `type`"),
    "denseIds": Option("false", "entry ids 0-1, 0-2, … instead of times (Redis 7)"),
    "writeId": Option("", "batch only: a name; rows written under it are not written again"),
    "sliceRows": Option("2000", "rows per EXEC at most"),
    "sliceBytes": Option("1000000", "bytes per EXEC, about, at most"),
    "fenceSeconds": Option("2592000", "how long Redis remembers which rows a query has written"),
}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options of a query that reads; can be pickled."""

    address: Address
    streams: tuple[str, ...]
    start: Bounds
    end: Bounds
    max_per_trigger: int | None = None
    min_partitions: int = 0
    max_per_partition: int | None = None
    max_bytes_per_batch: int = MAX_BYTES_PER_BATCH
    fail_on_data_loss: bool = True
    reader_name: str = ""
    mirror_group: str = ""
    discovery_seconds: float = 5.0
    types: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        options = Options(given, READ_OPTIONS, "the format 'conquiet', for reading,")
        ends = (options.text("endingOffsets"), options.text("endingTimestamp"))
        if streaming and ends != (None, None):
            raise ConfigError("endingOffsets is for batches: a stream has no end")
        default = "latest" if streaming else "earliest"
        return cls(
            address=options.address(*_REDIS),
            streams=_streams(options.text("streams") or ""),
            start=_bounds(options, "startingOffsets", "startingTimestamp", default, "earliest"),
            end=_bounds(options, "endingOffsets", "endingTimestamp", "latest", "latest"),
            max_per_trigger=options.whole("maxOffsetsPerTrigger"),
            min_partitions=options.whole("minPartitions", least=0) or 0,
            max_per_partition=options.whole("maxRecordsPerPartition"),
            max_bytes_per_batch=_batch_bytes(options),
            fail_on_data_loss=options.flag("failOnDataLoss", True),
            reader_name=options.text("readerName") or "",
            mirror_group=options.text("mirrorGroup") or "",
            discovery_seconds=options.seconds("discoverySeconds", 5.0),
            types=options.names("types"),
        )


@dataclass(frozen=True)
class WriteOptions:
    """The checked options of a query that writes; can be pickled."""

    address: Address
    topic: str | None = None
    partitions: int = 1
    source: str | None = None
    type: str | None = None
    write_id: str | None = None
    dense_ids: bool = False
    slice_rows: int = 2_000
    slice_bytes: int = 1_000_000
    fence_seconds: int = 30 * _DAY_SECONDS

    @classmethod
    def of(cls, given: Mapping[str, str]) -> WriteOptions:
        options = Options(
            given, WRITE_OPTIONS, "the format 'conquiet', for writing,", ignored=SET_BY_SPARK
        )
        made = cls(
            options.address(*_REDIS),
            topic=options.text("topic"),
            partitions=options.whole("partitions") or cls.partitions,
            source=options.text("source"),
            type=options.text("type"),
            write_id=options.text("writeId"),
            dense_ids=options.flag("denseIds", False),
            slice_rows=options.whole("sliceRows") or cls.slice_rows,
            slice_bytes=options.whole("sliceBytes") or cls.slice_bytes,
            fence_seconds=options.whole("fenceSeconds") or cls.fence_seconds,
        )
        if made.write_id == "":  # as from an unset variable; the rows would be written again
            raise ConfigError("option writeId is empty: give a name, or leave it out")
        if made.topic is not None:
            Topic(made.topic, made.partitions)  # refuses an empty name
        return made

    @property
    def entry_id(self) -> bytes:
        """The id argument of XADD: by the clock, or the last id plus one."""
        return b"0-*" if self.dense_ids else b"*"


def _streams(text: str) -> tuple[str, ...]:
    names: list[str] = []
    if text.lstrip().startswith("["):
        try:
            names = [str(name) for name in loads(text)]
        except (JSONDecodeError, TypeError):  # a pattern such as [ab]*
            names = []
    names = names or [name.strip() for name in text.split(",")]
    names = [name for name in names if name]
    if not names:
        raise ConfigError("name what to read: .option('streams', 'orders,payments:*')")
    return tuple(dict.fromkeys(names))


def _batch_bytes(options: Options) -> int:
    most = options.whole("maxBytesPerBatch")
    if most is not None and most > _LARGEST_BATCH:
        raise ConfigError(f"maxBytesPerBatch={most}: must be {_LARGEST_BATCH} (1 GiB) or less")
    return most or MAX_BYTES_PER_BATCH


def _bounds(options: Options, name: str, stamp: str, default: str, others: str) -> Bounds:
    text, moment = options.text(name), options.text(stamp)
    if text is not None and moment is not None:
        raise ConfigError(f"give {name} or {stamp}, not both")
    if moment is not None:
        return Bounds.of(name, str(options.whole(stamp, least=0)), others)
    return Bounds.of(name, text if text is not None else default, others)
