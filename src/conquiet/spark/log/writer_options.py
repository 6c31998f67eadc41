"""The options of the sink `conquiet`, read and checked once, on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from conquiet.errors import ConfigError
from conquiet.redis.topic import Topic
from conquiet.spark.log.connection import RedisAddress

_DAY_SECONDS = 24 * 60 * 60
_FLAGS = {"true": True, "false": False}
_OF_SPARK = {"path", "checkpointlocation", "queryname"}
"""What Spark itself hands on to a sink."""

WRITE_OPTIONS = {
    "url": ("", "where Redis is, as for reading; or `urlFile`, or `urlEnv`"),
    "urlFile": ("", "a file, on driver and executors, that holds the URL"),
    "urlEnv": ("", "an environment variable, on driver and executors, that holds the URL"),
    "topic": ("", "where events go; else the column `topic`, else the column `stream`"),
    "partitions": ("1", "streams of a topic, among which the key of an event chooses"),
    "source": ("", "for rows that have no `source`"),
    "type": ("", "for rows that have no `type`"),
    "denseIds": ("false", "entry ids 0-1, 0-2, … instead of times (Redis 7)"),
    "writeId": ("", "batch only: a name; what was written under it is not written again"),
    "sliceRows": ("2000", "rows per EXEC at most"),
    "sliceBytes": ("1000000", "bytes per EXEC, about, at most"),
    "fenceSeconds": ("2592000", "how long it is remembered what a query has written"),
}
"""Option → default and meaning."""


@dataclass(frozen=True)
class WriteOptions:
    """What travels to the executors."""

    address: RedisAddress
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
    def of(cls, options: Mapping[str, str]) -> WriteOptions:
        known = {str(name).lower(): value for name, value in options.items()}
        _refuse_unknown(known)
        made = cls(
            RedisAddress.of(options),
            topic=known.get("topic"),
            partitions=_count(known, "partitions", cls.partitions),
            source=known.get("source"),
            type=known.get("type"),
            write_id=known.get("writeid"),
            dense_ids=_flag(known, "denseIds"),
            slice_rows=_count(known, "sliceRows", cls.slice_rows),
            slice_bytes=_count(known, "sliceBytes", cls.slice_bytes),
            fence_seconds=_count(known, "fenceSeconds", cls.fence_seconds),
        )
        if made.write_id == "":  # as of a variable that was not set: it would be written again
            raise ConfigError("option writeId is empty: give a name, or leave it out")
        if made.topic is not None:
            Topic(made.topic, made.partitions)  # refuses an empty name
        return made

    @property
    def entry_id(self) -> bytes:
        """What XADD makes an id of: the time, or the last id and one more."""
        return b"0-*" if self.dense_ids else b"*"


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in WRITE_OPTIONS}
    for name in given:
        if name not in known and name not in _OF_SPARK:
            near = get_close_matches(name, known, 1)
            advice = f"; did you mean {known[near[0]]}?" if near else ""
            raise ConfigError(f"the format 'conquiet' has no option {name!r} for writing{advice}")


def _count(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name.lower())
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"option {name}={text!r}: must be a whole number of at least 1")
    return int(text)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name.lower(), "false")
    if text.lower() not in _FLAGS:
        raise ConfigError(f"option {name}={text!r}: must be true or false")
    return _FLAGS[text.lower()]
