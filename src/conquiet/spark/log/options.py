"""Options of the format `conquiet` for reading, with the names that Kafka's source has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from json import JSONDecodeError, loads

from conquiet.errors import ConfigError
from conquiet.spark.log.bounds import Bounds
from conquiet.spark.log.connection import RedisAddress

READ_OPTIONS = {
    "url": (
        "",
        "where Redis is: `redis://`, `rediss://`, `unix://`, `redis+cluster://`,"
        " `redis+sentinel://`",
    ),
    "urlFile": ("", "a file, on driver and executors, that holds the URL"),
    "urlEnv": ("", "an environment variable, on driver and executors, that holds the URL"),
    "streams": ("", "names and patterns (`events:*`), by commas or as a JSON list"),
    "startingOffsets": (
        "latest; in a batch earliest",
        "`earliest`, `latest`, a time (ISO 8601), or JSON with an id, a time or one of these"
        " words per stream; the entry with that id is read",
    ),
    "startingTimestamp": ("", "milliseconds since 1970, for all streams"),
    "endingOffsets": ("latest", "batch only; the entry with that id is not read"),
    "endingTimestamp": ("", "batch only; milliseconds since 1970, for all streams"),
    "maxOffsetsPerTrigger": ("none", "entries per micro-batch, exactly, over all streams"),
    "minPartitions": ("none", "tasks at least, even if they are small"),
    "maxRecordsPerPartition": ("2000000", "about how many entries a task reads at most"),
    "failOnDataLoss": (
        "true",
        "fail when entries are gone before they were read; else warn and count",
    ),
    "readerName": ("none", "registers the position, so that trimming keeps what is not read"),
    "mirrorGroup": ("none", "a group whose lag in XINFO GROUPS shows that of the query (Redis 7)"),
    "discoverySeconds": ("5", "how often patterns are looked up again"),
    "dataType": ("binary", "`string` if data is text"),
    "schema": ("", "DDL of JSON data; `data` is then a struct"),
    "types": ("", "by commas: events of other types are left out, before their data is parsed"),
}
"""Option → default and meaning."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a query asks for; can be pickled."""

    address: RedisAddress
    streams: tuple[str, ...]
    start: Bounds
    end: Bounds
    max_per_trigger: int | None = None
    min_partitions: int = 0
    max_per_partition: int | None = None
    fail_on_data_loss: bool = True
    reader_name: str = ""
    mirror_group: str = ""
    discovery_seconds: float = 5.0
    types: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        given = {str(name).lower(): value for name, value in options.items()}
        _refuse_unknown(given)
        if streaming and ("endingoffsets" in given or "endingtimestamp" in given):
            raise ConfigError("endingOffsets is for batches: a stream has no end")
        default = "latest" if streaming else "earliest"
        return cls(
            address=RedisAddress.of(given),
            streams=_streams(given.get("streams", "")),
            start=_bounds(given, "startingOffsets", "startingTimestamp", default, "earliest"),
            end=_bounds(given, "endingOffsets", "endingTimestamp", "latest", "latest"),
            max_per_trigger=_whole(given, "maxOffsetsPerTrigger", 1),
            min_partitions=_whole(given, "minPartitions", 0) or 0,
            max_per_partition=_whole(given, "maxRecordsPerPartition", 1),
            fail_on_data_loss=_flag(given, "failOnDataLoss", True),
            reader_name=given.get("readername", ""),
            mirror_group=given.get("mirrorgroup", ""),
            discovery_seconds=_seconds(given, "discoverySeconds", 5.0),
            types=tuple(name.strip() for name in given.get("types", "").split(",") if name.strip()),
        )


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in READ_OPTIONS}
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            advice = f"; did you mean {known[near[0]]}?" if near else ""
            raise ConfigError(f"the format 'conquiet' has no option {name!r} for reading{advice}")


def _streams(text: str) -> tuple[str, ...]:
    names: list[str] = []
    if text.lstrip().startswith("["):
        try:
            names = [str(name) for name in loads(text)]
        except (JSONDecodeError, TypeError):  # then it is a pattern such as [ab]*
            names = []
    names = names or [name.strip() for name in text.split(",")]
    names = [name for name in names if name]
    if not names:
        raise ConfigError("name what to read: .option('streams', 'orders,payments:*')")
    return tuple(dict.fromkeys(names))


def _bounds(given: Mapping[str, str], name: str, stamp: str, default: str, others: str) -> Bounds:
    text, moment = given.get(name.lower()), given.get(stamp.lower())
    if text is not None and moment is not None:
        raise ConfigError(f"give {name} or {stamp}, not both")
    if moment is not None:
        milliseconds = _whole(given, stamp, 0)
        return Bounds.of(name, str(milliseconds), others)
    return Bounds.of(name, text if text is not None else default, others)


def _whole(given: Mapping[str, str], name: str, least: int) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name}={text!r:.60}: must be a whole number, {least} or more")
    return number


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name.lower())
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"{name}={text!r:.60}: must be a number of seconds")
    return seconds


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name}={text!r:.60}: must be true or false")
    return text == "true"
