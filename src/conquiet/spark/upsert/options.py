"""UpsertOptions: which table, by which key, and which of two rows wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conquiet.errors import ConfigError
from conquiet.spark.address import Address
from conquiet.sql.tables import checked_name

OPTIONS = {
    "url": "where the database is: postgresql://USER@HOST/NAME or sqlite:////PATH/FILE",
    "urlFile": "instead of url: a file, on every host, that holds it",
    "urlEnv": "instead of url: an environment variable, on every host, that holds it",
    "table": "the table to write to; it must exist",
    "keys": "the columns of its key, with commas between; a unique index must have them",
    "orderBy": "of rows with the same key, the one that is highest in these columns wins, within a"
    " batch and against the table; without it, a key twice in a batch is an error",
    "query": "of a frame: whose batch it is, to write it once; a stream has a name of its own",
    "batch": "of a frame with `query`: the number of the batch; lower ones are written no more",
}
"""Every option and what it means; the table in the documentation is made of it."""

# What Spark itself hands on with those of a query.
_SPARKS = {"path", "checkpointlocation", "queryname"}


@dataclass(frozen=True)
class UpsertOptions:
    """The options of a write, checked."""

    address: Address
    table: str
    keys: tuple[str, ...]
    order_by: tuple[str, ...] = ()
    query: str | None = None
    batch: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, str], columns: Sequence[str]) -> UpsertOptions:
        known = {str(name).lower(): str(value) for name, value in given.items()}
        _refuse_unknown(known)
        for name in ("table", "keys"):
            if not known.get(name):
                raise ConfigError(f"conquiet-upsert needs the option {name}: {OPTIONS[name]}")
        checked_name(known["table"])
        keys, order = _names(known, "keys"), _names(known, "orderBy")
        for option, names in (("keys", keys), ("orderBy", order)):
            missing = [name for name in names if name not in columns]
            if missing:
                raise ConfigError(
                    f"{option}={', '.join(missing)}: the frame has no such column; it has"
                    f" {', '.join(columns)}"
                )
        return cls(Address.of(known), known["table"], keys, order, *_fence(known))


def _refuse_unknown(known: Mapping[str, str]) -> None:
    wrong = set(known) - {name.lower() for name in OPTIONS} - _SPARKS
    if wrong:
        raise ConfigError(
            f"conquiet-upsert knows no option {', '.join(sorted(wrong))};"
            f" it has {', '.join(OPTIONS)}"
        )


def _names(known: Mapping[str, str], option: str) -> tuple[str, ...]:
    parts: Iterable[str] = (part.strip() for part in known.get(option.lower(), "").split(","))
    return tuple(part for part in parts if part)


def _fence(known: Mapping[str, str]) -> tuple[str | None, int | None]:
    query, batch = known.get("query") or None, known.get("batch")
    if batch is None:
        return query, None
    if query is None or not batch.isdecimal():
        raise ConfigError(
            f"batch={batch!r:.40}: write a whole number from 0 on, and give the option query too"
        )
    return query, int(batch)
