"""Query: tables in SQL, kept by DuckDB. A refresh costs what changed, not what is stored.

    mart    sums by group; a group changes by the sums of its new rows minus those of its old rows
    query   any SQL; the groups that `touched` names are computed again and replaced

Both see the tables of the lake by name. A query's `touched` also sees `changed_<table>`: the old
and the new rows of what this refresh changed, in tables of facts, of silver, and in tables that an
earlier mart or query made.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, Self

import pyarrow as pa

from conquiet.errors import ConfigError
from conquiet.lake.tables import CHANGE, Files, Store, Writer

ROWS_PER_FILE = 50_000
"""Rows of a file at most: a file is written again if one of its rows changes."""
CHANGES = "_pipeline/changes"
"""Where changes of marts and queries are kept until a refresh is complete."""
_MEMORY = "1GB"
_word = re.compile(r"[a-z_][a-z0-9_]*", re.IGNORECASE)


@dataclass(frozen=True)
class Query:
    """A table in SQL that is computed again for the groups that changes touch."""

    name: str
    sql: str
    """Rows of the groups in `touched`, a table of the columns in `group`."""
    touched: str
    """The groups of changed rows, as SQL over `changed_<table>`; duplicates are fine."""
    group: str | Sequence[str]
    key: str | Sequence[str]
    """Columns that identify a row."""
    order_by: str | Sequence[str] = ()
    """Columns by which files are sorted before the key: a day keeps new rows together."""
    prepare: Callable[[Database], object] | None = None
    """Called when `touched` is made, before `sql` is run: it may make tables that `sql` reads."""

    def __post_init__(self) -> None:
        for name in ("group", "key", "order_by"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    @property
    def text(self) -> str:
        return f"{self.sql} {self.touched}"

    @property
    def sorted_by(self) -> tuple[str, ...]:
        """Columns by which the rows of a file are sorted."""
        return (*self.order_by, *(name for name in self.key if name not in self.order_by))


@dataclass(frozen=True)
class Mart:
    """A table of sums by group."""

    name: str
    of: str
    """SQL that gives the group and the measures of each row; selects of single tables, without
    joins, put together by UNION ALL BY NAME."""
    group: tuple[str, ...]
    sums: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        return self.group

    @property
    def sorted_by(self) -> tuple[str, ...]:
        return self.group

    @property
    def text(self) -> str:
        return self.of


def mart(
    name: str,
    *,
    of: str,
    by: Sequence[str],
    sums: Sequence[str] = (),
    counts: Mapping[str, str | None] | None = None,
) -> Mart:
    """Declare sums and counts by some columns of a table, or of SQL that gives rows to add up.

    >>> mart("daily", of="sale", by=["day"], sums=["cents"], counts={"sales": None}).of
    'SELECT "day", "cents", 1 AS "sales" FROM "sale"'
    """
    counted = dict(counts or {})
    if _word.fullmatch(of):
        measures = [quoted(name) for name in sums]
        measures += [_count(condition, name) for name, condition in counted.items()]
        of = f"SELECT {', '.join([quoted(*by), *measures])} FROM {quoted(of)}"
    elif counted:
        raise ConfigError(f"mart {name}: SQL counts by itself; name its columns in sums=")
    if not sums and not counted:
        raise ConfigError(f"mart {name}: name the columns to add up, sums=, or counts=")
    return Mart(name, of, tuple(by), (*sums, *counted))


def digest(one: Query | Mart) -> str:
    """Return a hash of a definition, which another one of the same name has not."""
    parts = [getattr(one, field.name) for field in fields(one) if field.name != "prepare"]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@contextmanager
def naming(sql: str) -> Iterator[None]:
    """Raise an error that says whose SQL it is, if it cannot be read or names what is not there."""
    import duckdb

    try:
        yield
    except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException) as error:
        raise ConfigError(f"{sql}: {str(error).splitlines()[0]:.500}") from error


def _count(condition: str | None, name: str) -> str:
    return f"{'1' if condition is None else f'({condition})::INT'} AS {quoted(name)}"


def quoted(*names: str) -> str:
    """Write names for SQL, as columns or tables that may be named as its keywords are.

    >>> quoted("order", "day")
    '"order", "day"'
    """
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)


class Database:
    """DuckDB over tables of a lake, each a view by its name."""

    def __init__(self, store: Store, names: Iterable[str], zone: str = "UTC") -> None:
        import duckdb

        self._store = store
        self.names = set(names)
        self._views: set[str] = set()
        self._registered = 0
        self._stack = ExitStack()
        spill = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="conquiet-sql-"))
        self.connection = self._stack.enter_context(duckdb.connect())
        settings: dict[str, Any] = {
            "TimeZone": "UTC",
            "memory_limit": _MEMORY,
            "temp_directory": spill,
        }
        settings |= {"threads": os.cpu_count() or 1, "preserve_insertion_order": False}
        for name, value in settings.items():
            self.run(f"SET {name} = {value!r}")
        self.run(f"CREATE MACRO local_day(moment) AS timezone('{zone}', moment)::DATE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, sql: str) -> Any:
        return self.connection.execute(sql)

    def arrow(self, sql: str) -> pa.Table:
        return self.connection.sql(sql).to_arrow_table()

    def count(self, sql: str) -> int:
        [(found,)] = self.run(f"SELECT count(*) FROM {sql}").fetchall()
        return int(found)

    def exists(self, name: str) -> bool:
        """Return whether a table was ever written."""
        return self._store.exists(name)

    def require(self, name: str) -> None:
        """Make the view of a table; raise if there is none."""
        if name not in self.names:
            raise ConfigError(
                f"{self._store.files_of_lake.root} has no table {name!r:.60}; there are"
                f" {', '.join(sorted(self.names)) or 'none'}"
            )
        self.see(name)
        if name not in self._views:
            raise ConfigError(f"the table {name} is not made yet: the first refresh makes it")

    def offer(self, text: str) -> None:
        """Make views of the tables that a text of SQL names."""
        for name in sorted(self.names & set(_word.findall(text.lower())) - self._views):
            self.see(name)

    def see(self, name: str) -> None:
        """Make or renew the view of a table, unless the table does not exist yet."""
        files = self._store.files(name)
        schema = self._store.schema(name)
        if not files and schema is None:
            return
        rows = self.rows(files) if files else self.nothing(name, schema)
        hidden = [one for one in schema.names if one.startswith("_")] if schema else []
        shown = f"* EXCLUDE ({quoted(*hidden)})" if hidden else "*"
        self._views.add(name)
        sql = self._reading(name, f"(SELECT {shown} FROM {rows})")
        self.run(f"CREATE OR REPLACE VIEW main.{quoted(name)} AS {sql}")

    def _reading(self, name: str, rows: str) -> str:
        """Return the SQL that reads a table, with what later batches add to its rows."""
        if name == "expectations":
            return (
                "SELECT rule, day, sum(checked)::BIGINT AS checked, sum(failed)::BIGINT AS failed"
                f" FROM {rows} GROUP BY ALL"
            )
        if name in ("events", "events_quarantine") and self._store.files("redeliveries"):
            self.offer("redeliveries")
            return (
                "WITH again AS (SELECT event_id AS id, sum(entries)::BIGINT AS more,"
                " min(first_seen_at) AS earliest FROM redeliveries GROUP BY 1)"
                " SELECT * EXCLUDE (id, more, earliest)"
                " REPLACE (delivery_count + coalesce(more, 0) AS delivery_count,"
                " least(first_seen_at, earliest) AS first_seen_at)"
                f" FROM {rows} LEFT JOIN again"
                " ON id = coalesce(nullif(event_id, ''), stream || '/' || entry_id)"
            )
        return f"FROM {rows}"

    def nothing(self, name: str, schema: pa.Schema) -> str:
        """Return a relation with the columns of a table and no rows."""
        self.connection.register(f"no_{name}", schema.empty_table())
        return f"no_{name}"

    def rows(self, files: Sequence[str], *, named: bool = False) -> str:
        """Return a relation of Parquet files; `named` adds the column `filename`."""
        if "://" not in files[0]:
            listed = ", ".join("'" + one.replace("'", "''") + "'" for one in files)
            return (
                f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false,"
                f" filename = {str(named).lower()})"
            )
        self._registered += 1
        name = f"stored_{self._registered}"
        lake = self._store.files_of_lake
        self.connection.register(name, _named(lake, files) if named else lake.dataset(files))
        return name


def _named(lake: Files, uris: Sequence[str]) -> pa.Table:
    """Read files of an object store, each row with the URI of its file."""
    parts = []
    for uri in uris:
        rows = lake.read([uri])
        parts.append(rows.append_column("filename", pa.repeat(uri, len(rows))))
    return pa.concat_tables(parts, promote_options="default")


class TableRefresh(Database):
    """Brings marts and queries up to what changed, in the order of their declaration."""

    def __init__(
        self,
        store: Store,
        changes: Mapping[str, Sequence[str]],
        version: int,
        names: Iterable[str],
        zone: str = "UTC",
        redefined: Collection[str] = (),
    ) -> None:
        super().__init__(store, names, zone)
        self._changes = changes
        self._redefined = redefined
        self._version = version
        for schema in ("old", "new", "work"):
            self.run(f"CREATE SCHEMA {schema}")
        self._changed: set[str] = set()

    def _reading(self, name: str, rows: str) -> str:
        """Return rows as they are stored: a refresh reads redeliveries where it needs them."""
        return f"FROM {rows}"

    def apply(self, queries: Sequence[Query | Mart]) -> Iterator[tuple[str, int]]:
        """Refresh each table; yield its name and the number of rows written or removed."""
        later = {
            one.name: " ".join(two.text for two in queries[n + 1 :])
            for n, one in enumerate(queries)
        }
        for one in queries:
            is_read = one.name in _word.findall(later[one.name].replace("changed_", " "))
            with naming(f"the SQL of the table {one.name}"):
                changed = self._apply(one, is_read=is_read)
            yield one.name, changed

    def _apply(self, one: Query | Mart, *, is_read: bool) -> int:
        if self._store.version(one.name) >= self._version:  # committed before a crash
            self._recall(one.name)
            return 0
        self._offer_changes(one.text)
        self.offer(one.text)
        self.see(one.name)
        # A table that was declared after others were filled, or otherwise than before, is made of
        # all their rows.
        is_whole = self._store.schema(one.name) is None or one.name in self._redefined
        if isinstance(one, Mart):
            self._add_up(one, is_whole=is_whole)
        else:
            self._compute(one, is_whole=is_whole)
        return self._commit(one, is_read=is_read)

    # --- changes ----------------------------------------------------------------------------

    def _offer_changes(self, text: str) -> None:
        """Make `old.<table>`, `new.<table>` and `changed_<table>` of the tables that SQL names."""
        words = set(_word.findall(text.lower().replace("changed_", " ")))
        for name in sorted((self.names & words) - self._changed):
            self._offer_change(name, self._changes.get(name) or [])

    def _offer_change(self, name: str, files: Sequence[str]) -> None:
        if files:
            rows = self.rows(files)
            columns = {row[0] for row in self.run(f"DESCRIBE FROM {rows}").fetchall()}
            has_sign = CHANGE in columns
            others = f"* EXCLUDE ({CHANGE})" if has_sign else "*"
            sign = f"coalesce({CHANGE}, 1)" if has_sign else "1"
            self.run(
                f"CREATE VIEW new.{quoted(name)} AS SELECT {others} FROM {rows} WHERE {sign} > 0"
            )
            self.run(
                f"CREATE VIEW old.{quoted(name)} AS SELECT {others} FROM {rows} WHERE {sign} < 0"
            )
        else:
            schema = self._store.schema(name)
            if schema is None:
                return
            for when in ("old", "new"):
                self.run(f"CREATE VIEW {when}.{quoted(name)} AS FROM {self.nothing(name, schema)}")
        self._offer_both(name)

    def _offer_both(self, name: str) -> None:
        self._changed.add(name)
        self.run(
            f"CREATE VIEW main.changed_{name} AS FROM old.{quoted(name)}"
            f" UNION ALL BY NAME FROM new.{quoted(name)}"
        )

    def _recall(self, name: str) -> None:
        """Find the changes again of a table that an interrupted refresh has committed."""
        lake, file = self._store.files_of_lake, self._change_file(name)
        is_kept = file in lake.list(CHANGES)
        # The first rows of a table are its change: no copy of them was kept.
        self._offer_change(name, [lake.uri(CHANGES, file)] if is_kept else self._store.files(name))
        self.see(name)

    # --- the new rows of the touched groups, in work.found ----------------------------------

    def _add_up(self, one: Mart, *, is_whole: bool) -> None:
        group = quoted(*one.group)
        types = self._types_of_sums(one)
        has_floats = "DOUBLE" in types.values()
        sums = ", ".join(
            f"coalesce({'fsum' if type_ == 'DOUBLE' else 'sum'}({name}), 0)::{type_} AS {name}"
            for name, type_ in types.items()
        )
        added_up = f"SELECT {group}, count(*) AS _rows, {sums} FROM"
        if is_whole:
            self._find_before(one, is_whole=True)
            self.run(
                f"CREATE OR REPLACE TABLE work.found AS {added_up} ({one.of}) GROUP BY {group}"
            )
            return
        for when in ("old", "new"):
            self.run(f"SET search_path = '{when},main'")
            self.run(
                f"CREATE OR REPLACE TABLE work.{when} AS {added_up} ({one.of}) GROUP BY {group}"
            )
        self.run("SET search_path = 'main'")
        lost = ", ".join(f"-{name} AS {name}" for name in types)
        every = {"_rows": "BIGINT", **types}
        self.run(
            "CREATE OR REPLACE TABLE work.moved AS"
            f" SELECT {group}, {_summed(every)} FROM (FROM work.new UNION ALL BY NAME"
            f" SELECT {group}, -_rows AS _rows, {lost} FROM work.old) GROUP BY {group}"
            f" HAVING {' OR '.join(f'sum({name}) <> 0' for name in every)}"
        )
        self.run(f"CREATE OR REPLACE TABLE work.touched AS SELECT {group} FROM work.moved")
        self._find_before(one)
        stored = "UNION ALL BY NAME SELECT * EXCLUDE (filename) FROM work.before"
        found = (
            f"SELECT {group}, {_summed(every)}"
            f" FROM (FROM work.moved {stored if self._has_before else ''})"
            f" GROUP BY {group} HAVING sum(_rows) <> 0"
        )
        if has_floats:  # a difference of sums would keep the rounding of all that came before
            rows = _joined(f"({one.of})", "SEMI", "work.touched", one.group)
            found = f"{added_up} {rows} GROUP BY {group}"
        self.run(f"CREATE OR REPLACE TABLE work.found AS {found}")

    def _types_of_sums(self, one: Mart) -> dict[str, str]:
        """Return the type of each sum by its column: whole numbers stay whole, decimals exact."""
        described = self.run(f"DESCRIBE SELECT {quoted(*one.sums)} FROM ({one.of})").fetchall()
        found = {}
        for name, type_, *_ in described:
            if type_ in ("FLOAT", "DOUBLE"):
                found[quoted(name)] = "DOUBLE"
            elif type_.startswith("DECIMAL"):
                found[quoted(name)] = f"DECIMAL(38,{type_.rpartition(',')[2]}"
            else:
                found[quoted(name)] = "BIGINT"
        return found

    def _compute(self, one: Query, *, is_whole: bool) -> None:
        group = quoted(*one.group)
        touched = one.touched
        if is_whole:
            touched = re.sub(r'"?\bchanged_(\w+)"?', r'"\1"', touched)
            self.offer(touched)
        self.run(
            f"CREATE OR REPLACE TABLE work.touched AS SELECT DISTINCT * FROM ({touched})"
            f" AS groups({group})"
        )
        self.run("CREATE OR REPLACE VIEW main.touched AS FROM work.touched")
        self._find_before(one, is_whole=is_whole)
        if one.prepare is not None:
            one.prepare(self)
        self.run(f"CREATE OR REPLACE TABLE work.found AS {one.sql}")

    def _find_before(self, one: Query | Mart, *, is_whole: bool = False) -> None:
        """Read the stored rows of the touched groups into work.before, with their files; all of
        them if the whole table is made again."""
        files = self._store.files(one.name)
        if files and not is_whole:
            touched = _joined(self.rows(files, named=True), "SEMI", "work.touched", one.group)
            found = self.run(f"SELECT DISTINCT filename FROM {touched}").fetchall()
            files = [row[0] for row in found]
        self._has_before = bool(files)
        if files:  # a scan of few columns found them; the others are read of these files alone
            rows = self.rows(files, named=True)
            if not is_whole:
                rows = _joined(rows, "SEMI", "work.touched", one.group)
            self.run(f"CREATE OR REPLACE TABLE work.before AS FROM {rows}")

    # --- commit -----------------------------------------------------------------------------

    def _commit(self, one: Query | Mart, *, is_read: bool) -> int:
        """Replace the files in which a row changed, and keep the changes for later queries."""
        remove: list[str] = []
        old, new = (f"{when}.{quoted(one.name)}" for when in ("old", "new"))
        is_first = self._store.schema(one.name) is None
        is_redefined = one.name in self._redefined and not is_first
        before = "SELECT * EXCLUDE (filename) FROM work.before"
        if self._has_before and is_redefined:  # it may have other columns than before
            self.run(f"CREATE OR REPLACE TABLE {old} AS {before}")
            self.run(f"CREATE OR REPLACE TABLE {new} AS FROM work.found")
        elif self._has_before:
            self.run(
                f"CREATE OR REPLACE TABLE {old} AS"
                f" {before} EXCEPT ALL SELECT {self._columns()} FROM work.found"
            )
            self.run(
                f"CREATE OR REPLACE TABLE {new} AS"
                f" SELECT {self._columns()} FROM work.found EXCEPT ALL {before}"
            )
            gone = _joined("work.before", "SEMI", old, one.key)
            found = self.run(f"SELECT DISTINCT filename FROM {gone}").fetchall()
            remove = [row[0] for row in found]
        else:
            self.run(f"CREATE OR REPLACE TABLE {old} AS FROM work.found LIMIT 0")
            self.run("DROP TABLE IF EXISTS work.before")
            self.run(f"CREATE OR REPLACE TABLE {new} AS FROM work.found")
        self._offer_both(one.name)
        changed = self.count(f"main.changed_{one.name}")
        if changed or is_first or is_redefined:
            if is_read and not is_first:
                self._keep(one.name)
            self._store.replace(
                one.name,
                remove=remove,
                add=self._rows_to_add(one, remove),
                version=self._version,
                is_whole=is_redefined,
            )
        self.see(one.name)
        return changed

    def _columns(self) -> str:
        """Name the columns in the order of the stored table."""
        names = [row[0] for row in self.run("DESCRIBE work.before").fetchall()]
        return quoted(*(name for name in names if name != "filename"))

    def _change_file(self, name: str) -> str:
        return f"{self._version}-{name}.parquet"

    def _keep(self, name: str) -> None:
        """Write the changes of a table before its commit, which makes them hard to find again."""
        rows = self.arrow(
            f"SELECT *, -1::TINYINT AS {CHANGE} FROM old.{quoted(name)}"
            f" UNION ALL BY NAME SELECT *, 1::TINYINT AS {CHANGE} FROM new.{quoted(name)}"
        )
        lake, file = self._store.files_of_lake, self._change_file(name)
        lake.new_name(CHANGES)
        with Writer(lake, CHANGES, rows.schema, name=file) as writer:
            writer.write(rows)

    def _rows_to_add(self, one: Query | Mart, remove: Sequence[str]) -> Iterator[pa.Table]:
        """Read the new rows, and those that stay of the files to remove, a file's worth each."""
        rows = f"FROM new.{quoted(one.name)}"
        if remove:
            kept = _joined(self.rows(remove), "ANTI", f"old.{quoted(one.name)}", one.key)
            rows += f" UNION ALL BY NAME FROM {kept}"
        found = self.connection.sql(f"SELECT * FROM ({rows}) ORDER BY {quoted(*one.sorted_by)}")
        yield from _tables(found.to_arrow_reader(ROWS_PER_FILE))


def _joined(rows: str, kind: str, others: str, columns: Sequence[str]) -> str:
    """Join rows with others that have the same values, be they null, in some columns."""
    same = " AND ".join(
        f"those.{name} IS NOT DISTINCT FROM these.{name}" for name in map(quoted, columns)
    )
    return f"{rows} AS these {kind} JOIN {others} AS those ON {same}"


def _summed(types: Mapping[str, str]) -> str:
    return ", ".join(f"sum({name})::{type_} AS {name}" for name, type_ in types.items())


def _tables(batches: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Join batches to tables of `ROWS_PER_FILE` rows; one empty table if there are no rows."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    is_empty = True
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        count += batch.num_rows
        if count >= ROWS_PER_FILE:
            yield pa.Table.from_batches(waiting)
            waiting, count, is_empty = [], 0, False
    if waiting or is_empty:
        yield pa.Table.from_batches(waiting, schema=batches.schema)


def forget_changes(lake: Files) -> None:
    """Remove the changes that a complete refresh kept."""
    for name in lake.list(CHANGES):
        lake.remove(f"{CHANGES}/{name}")
