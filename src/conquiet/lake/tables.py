"""Tables: the Delta tables of a lake, on a local disk or in an S3 store.

    Files   writes Parquet files in place and reads them; executors have a copy
    Store   commits names of files, with the version of the batch as Delta's application transaction

A file is visible once a commit names it. A file that no commit names is an orphan, which VACUUM
removes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from conquiet.errors import ConfigError

try:
    from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Transaction
    from deltalake import Schema as DeltaSchema
    from deltalake.transaction import AddAction, RemoveAction
except ImportError as error:
    raise ConfigError(f"{error.name} is not installed: pip install 'conquiet[lake]'") from error

ROWS_PER_FILE = 200_000
CHANGE = "_change"
"""The column of a file of changes: +1 for a row that was added, −1 for one that was removed."""

_S3_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ALLOW_HTTP",
)
_LONGEST_STATISTIC = 64
_TIER = 8
"""A file that is so many times as large as all smaller ones is not written again with them."""
_FEW_ROWS = 1_000
_COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True)
class DataFile:
    """A Parquet file that was written and is not yet part of its table."""

    name: str
    """Below the table's folder."""
    rows: int
    size: int
    stats: str
    """Delta's statistics, as JSON."""

    def action(self, is_change: bool) -> AddAction:
        now = int(time.time() * 1000)
        return AddAction(self.name, self.size, {}, now, is_change, self.stats)


class Files:
    """The files below the root of a lake."""

    def __init__(self, root: str) -> None:
        self.is_local = "://" not in root
        self.root = os.path.abspath(root) if self.is_local else root.rstrip("/")
        if not self.is_local and not root.startswith(("s3://", "s3a://")):
            raise ConfigError(f"lake={root!r:.80}: a folder, or s3://bucket/path")
        self.options = (
            {}
            if self.is_local
            else {name: os.environ[name] for name in _S3_ENVIRONMENT if name in os.environ}
        )
        self._open()

    def _open(self) -> None:
        if self.is_local:
            self.fs = pyarrow.fs.LocalFileSystem()
            self._base = self.root
            return
        get = self.options.get
        endpoint = get("AWS_ENDPOINT_URL")
        self.fs = pyarrow.fs.S3FileSystem(
            access_key=get("AWS_ACCESS_KEY_ID"),
            secret_key=get("AWS_SECRET_ACCESS_KEY"),
            session_token=get("AWS_SESSION_TOKEN"),
            region=get("AWS_REGION") or get("AWS_DEFAULT_REGION") or "us-east-1",
            endpoint_override=endpoint.split("://")[-1] if endpoint else None,
            scheme="http" if endpoint and endpoint.startswith("http://") else "https",
        )
        self._base = self.root.partition("://")[2]

    def __getstate__(self) -> dict[str, Any]:
        return {"is_local": self.is_local, "root": self.root, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def uri(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def path(self, uri: str) -> str:
        """Return the path of a URI of this lake for `fs`."""
        return uri if self.is_local else uri.partition("://")[2]

    def new_name(self, table: str) -> str:
        """Return a new file name for a table, and create its folder."""
        if self.is_local:
            os.makedirs(f"{self.root}/{table}", exist_ok=True)
        return f"part-{uuid.uuid4().hex}.parquet"

    def write(
        self, table: str, rows: pa.Table, dictionary: Sequence[str] = (), skip: Sequence[str] = ()
    ) -> DataFile:
        """Write a Parquet file in place; `dictionary` names columns that repeat few values, `skip`
        columns without statistics."""
        name = self.new_name(table)
        with Writer(self, table, rows.schema, dictionary, skip, name) as writer:
            writer.write(rows)
        return writer.file()

    def read(self, uris: Iterable[str], columns: Sequence[str] | None = None) -> pa.Table:
        """Read Parquet files as one table; columns that a file lacks are null."""
        parts = [
            pq.ParquetFile(self.path(uri), filesystem=self.fs).read(
                columns=None if columns is None else list(columns)
            )
            for uri in uris
        ]
        return pa.concat_tables(parts, promote_options="default") if parts else pa.table({})

    def dataset(self, uris: Sequence[str]) -> Any:
        """Open Parquet files as a dataset of pyarrow, which DuckDB can query."""
        import pyarrow.dataset

        paths = [self.path(uri) for uri in uris]
        return pyarrow.dataset.dataset(paths, filesystem=self.fs, format="parquet")

    # --- small files that are not of a table ----------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Write a file below the root so that a reader sees all of it or the one before."""
        path = f"{self._base}/{name}"
        if not self.is_local:
            with self.fs.open_output_stream(path) as out:
                out.write(data)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # One driver writes a lake: after a kill, the next write of this name replaces the rest.
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def get(self, name: str) -> bytes | None:
        try:
            with self.fs.open_input_stream(f"{self._base}/{name}") as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def exist(self) -> bool:
        """Return whether there is anything below the root."""
        selector = pyarrow.fs.FileSelector(self._base, allow_not_found=True)
        return bool(self.fs.get_file_info(selector))

    def list(self, folder: str) -> list[str]:
        """Return the names of the files in a folder below the root."""
        selector = pyarrow.fs.FileSelector(f"{self._base}/{folder}", allow_not_found=True)
        found = self.fs.get_file_info(selector)
        return sorted(one.base_name for one in found if one.type == pyarrow.fs.FileType.File)

    def remove(self, name: str) -> None:
        try:
            self.fs.delete_file(f"{self._base}/{name}")
        except FileNotFoundError:
            pass


class Writer:
    """Writes one Parquet file in place, and counts what Delta's statistics need."""

    def __init__(
        self,
        files: Files,
        table: str,
        schema: pa.Schema,
        dictionary: Sequence[str] = (),
        skip: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self.name = name or files.new_name(table)
        self._files = files
        self._path = files.path(files.uri(table, self.name))
        plain = [
            one.name for one in schema if not pa.types.is_nested(one.type) and one.name not in skip
        ]
        self._writer = pq.ParquetWriter(
            self._path,
            schema,
            filesystem=files.fs,
            compression=_COMPRESSION,
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=[name for name in dictionary if name in schema.names],
            write_statistics=plain,
            store_schema=False,
        )
        self.rows = 0
        self._schema = schema
        self._counted: DataFile | None = None

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)
        self.rows += len(rows)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()
        metadata = self._writer.writer.metadata
        size = self._files.fs.get_file_info(self._path).size
        self._counted = DataFile(self.name, self.rows, size, _statistics(metadata, self._schema))

    def file(self) -> DataFile:
        assert self._counted is not None, "the writer is closed"
        return self._counted


def _statistics(metadata: Any, schema: pa.Schema) -> str:
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for place in range(row_group.num_columns):
            column = row_group.column(place)
            name, found = column.path_in_schema, column.statistics
            if "." in name or found is None:
                continue
            nulls[name] = nulls.get(name, 0) + (found.null_count or 0)
            if not found.has_min_max:
                if found.null_count != row_group.num_rows:
                    unknown.add(name)
                continue
            low, high = found.min, found.max
            lows[name] = min(lows[name], low) if name in lows else low
            highs[name] = max(highs[name], high) if name in highs else high
    kinds = (pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp, pa.types.is_string)
    for name in list(lows):
        is_long = isinstance(highs[name], str) and (
            max(len(highs[name]), len(lows[name])) > _LONGEST_STATISTIC
        )
        if name in unknown or is_long or not any(is_a(schema.field(name).type) for is_a in kinds):
            del lows[name], highs[name]
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "minValues": {name: _text(value) for name, value in lows.items()},
            "maxValues": {name: _text(value) for name, value in highs.items()},
            "nullCount": nulls,
        }
    )


def _text(value: Any) -> Any:
    if hasattr(value, "hour"):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value.isoformat() if hasattr(value, "isoformat") else value


class Store:
    """The Delta tables of a lake. One driver writes them at a time."""

    def __init__(
        self, files: Files, app: str, declared: Mapping[str, pa.Schema] | None = None
    ) -> None:
        self.files_of_lake = files
        self.app = app
        """The id of the application transactions."""
        self._declared = dict(declared or {})
        self._tables: dict[str, DeltaTable] = {}
        self._lock = threading.Lock()

    def _table(self, name: str) -> DeltaTable | None:
        with self._lock:
            table = self._tables.get(name)
        if table is None:
            uri, options = self.files_of_lake.uri(name), self.files_of_lake.options
            if not DeltaTable.is_deltatable(uri, options):
                return None
            table = DeltaTable(uri, storage_options=options)
            with self._lock:
                self._tables[name] = table
        return table

    def names(self) -> list[str]:
        """Return the tables of the lake."""
        selector = pyarrow.fs.FileSelector(self.files_of_lake._base, allow_not_found=True)
        folders = [
            one.base_name
            for one in self.files_of_lake.fs.get_file_info(selector)
            if one.type == pyarrow.fs.FileType.Directory and not one.base_name.startswith("_")
        ]
        return sorted(name for name in folders if self.exists(name))

    def exists(self, name: str) -> bool:
        return self._table(name) is not None

    def schema(self, name: str) -> pa.Schema | None:
        """Return the columns of a table; the declared ones if it was never written."""
        table = self._table(name)
        return self._declared.get(name) if table is None else pa.schema(table.schema().to_arrow())

    def check_types(self, names: Iterable[str]) -> None:
        """Refuse declared columns of another type than a table has: Delta would take their files,
        and no reader could read them."""
        for name in names:
            table, declared = self._table(name), self._declared[name]
            if table is None:
                continue
            types = {one.name: one.type for one in table.schema().fields}
            for one in DeltaSchema.from_arrow(declared).fields:
                if types.get(one.name, one.type) != one.type:
                    stored = pa.schema(table.schema().to_arrow()).field(one.name).type
                    raise ConfigError(
                        f"table {name} has {one.name} as {stored}, and the pipeline as"
                        f" {declared.field(one.name).type}: give the new field another name, or"
                        " take raw_events into a new lake (conquiet pipeline import)"
                    )

    def version(self, name: str, app: str | None = None) -> int:
        """Return the last batch that a table has; −1 if it has none."""
        table = self._table(name)
        found = None if table is None else table.transaction_version(app or self.app)
        return -1 if found is None else int(found)

    def files(self, name: str) -> list[str]:
        """Return the URIs of a table's files."""
        return [self.files_of_lake.uri(name, one) for one in self._names(name)]

    def _names(self, name: str) -> list[str]:
        table = self._table(name)
        return [] if table is None else list(map(unquote, _actions(table)["path"].to_pylist()))

    def ranges(self, name: str, column: str) -> list[tuple[str, Any, Any]]:
        """Return each file's URI with the least and the greatest value of a column, or None."""
        return [(uri, low, high) for uri, _, low, high in self._sizes(name, column)]

    def _sizes(self, name: str, column: str) -> list[tuple[str, int, Any, Any]]:
        """Return each file's URI, rows, and the least and greatest value of a column, or None."""
        table = self._table(name)
        if table is None:
            return []
        actions = _actions(table)
        empty = [None] * len(actions)
        low, high = (
            actions.column(f"{side}.{column}").to_pylist()
            if f"{side}.{column}" in actions.column_names
            else empty
            for side in ("min", "max")
        )
        names, rows = (actions.column(one).to_pylist() for one in ("path", "num_records"))
        return [
            (self.files_of_lake.uri(name, unquote(one)), count, least, most)
            for one, count, least, most in zip(names, rows, low, high, strict=True)
        ]

    def read(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a whole table."""
        schema = self.schema(name)
        if schema is None:
            raise ConfigError(
                f"{self.files_of_lake.root} has no table {name}; its tables:"
                f" {', '.join(self.names()) or 'none'}"
            )
        if columns is not None:
            schema = pa.schema([schema.field(one) for one in columns])
        found = self.files(name)
        if not found:
            return schema.empty_table()
        rows = self.files_of_lake.read(found, columns)
        return pa.concat_tables([rows, schema.empty_table()], promote_options="default").select(
            schema.names
        )

    # --- writing --------------------------------------------------------------------------------

    def commit(
        self,
        name: str,
        add: Sequence[DataFile],
        version: int,
        *,
        schema: pa.Schema,
        remove: Sequence[str] = (),
        app: str | None = None,
        is_change: bool = True,
        is_whole: bool = False,
    ) -> bool:
        """Add files and remove others (URIs) in one commit; False if the table has this version.

        The application transaction is what makes a repeated commit change nothing. `is_change` is
        false for rows that are only stored in other files; with `is_whole` the files and the
        columns take the place of all that the table has.
        """
        table = self._table(name) or self._create(name, schema)
        if self.version(name, app) >= version:
            return False
        if not is_whole:
            self._add_columns(table, name, schema)
        now = int(time.time() * 1000)
        start = len(self.files_of_lake.uri(name, ""))
        gone = [RemoveAction(uri[start:], is_change, now) for uri in remove]
        table.create_write_transaction(
            [*gone, *(one.action(is_change) for one in add)],
            "overwrite" if is_whole else "append",
            DeltaSchema.from_arrow(schema) if is_whole else table.schema(),
            [],
            commit_properties=CommitProperties(
                app_transactions=[Transaction(app or self.app, version)], max_commit_retries=0
            ),
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
        )
        table.update_incremental()
        return True

    def _create(self, name: str, schema: pa.Schema) -> DeltaTable:
        files = self.files_of_lake
        if files.is_local:
            os.makedirs(files.uri(name), exist_ok=True)
        table = DeltaTable.create(
            files.uri(name),
            DeltaSchema.from_arrow(schema),
            mode="ignore",
            storage_options=files.options,
            configuration={"delta.checkpointInterval": "50"},
        )
        with self._lock:
            self._tables[name] = table
        return table

    def _add_columns(self, table: DeltaTable, name: str, schema: pa.Schema) -> None:
        there = {one.name for one in table.schema().fields}
        if all(column in there for column in schema.names):
            return
        wanted = DeltaSchema.from_arrow(schema).fields
        new = [Field.from_json(one.to_json()) for one in wanted if one.name not in there]
        table.alter.add_columns(new)
        table.update_incremental()

    def replace(
        self,
        name: str,
        *,
        remove: Sequence[str] = (),
        add: pa.Table | Iterable[pa.Table],
        version: int,
        is_whole: bool = False,
    ) -> bool:
        """Write rows as new files in place of some files, in one commit; `is_whole` is as for
        `commit`."""
        if self.version(name) >= version:
            return False
        schema = self.schema(name)
        written: list[DataFile] = []
        for part in [add] if isinstance(add, pa.Table) else add:
            schema = part.schema  # it may have columns that the table has not
            written += self._write(name, part)
        if schema is None:
            raise ConfigError(f"table {name} has neither columns nor rows yet")
        return self.commit(name, written, version, schema=schema, remove=remove, is_whole=is_whole)

    def _write(
        self, name: str, rows: pa.Table, rows_per_file: int = ROWS_PER_FILE
    ) -> list[DataFile]:
        return [
            self.files_of_lake.write(name, rows.slice(start, rows_per_file))
            for start in range(0, len(rows), rows_per_file)
        ]

    def overwrite(
        self,
        name: str,
        rows: pa.Table,
        version: int,
        partition_by: str | None = None,
        order_by: Sequence[str] = (),
    ) -> bool:
        """Replace all rows of a table."""
        parts = [
            part.sort_by([(one, "ascending") for one in order_by]) if order_by else part
            for _, part in _groups(rows, partition_by)
        ]
        return self.replace(name, remove=self.files(name), add=parts or rows, version=version)

    def merge(
        self,
        name: str,
        changes: pa.Table,
        version: int,
        *,
        key: Sequence[str],
        partition_by: str | None,
        schema: pa.Schema,
    ) -> bool:
        """Apply rows that were added and removed, by key; rewrite only files that hold such keys.

        A file holds the rows of one value of `partition_by`.
        """
        if self.version(name) >= version:
            return False
        added = changes.filter(pc.equal(changes[CHANGE], 1)).select(schema.names)
        needed = [*key, *([partition_by] if partition_by and partition_by not in key else [])]
        removed = changes.filter(pc.equal(changes[CHANGE], -1)).select(needed)
        gone = _keys(removed, key)
        writes: list[pa.Table] = []
        remove: list[str] = []
        kept: dict[Any, list[pa.Table]] = {}
        if len(removed):
            days = set(removed[partition_by].to_pylist()) if partition_by else None
            for uri, low, high in self.ranges(name, partition_by or key[0]):
                value = low if partition_by and low == high else None
                if days is not None and low is not None and value is not None and value not in days:
                    continue
                rows = self.files_of_lake.read([uri])
                stays = pc.invert(pc.is_in(_keys(rows, key), value_set=gone))
                left = rows.filter(stays)
                if len(left) < len(rows):
                    remove.append(uri)
                    left = pa.concat_tables([left, schema.empty_table()], promote_options="default")
                    kept.setdefault(value, []).append(left.select(schema.names))
        for value, rows in _groups(added, partition_by):
            kept.setdefault(value, []).append(rows)
        for parts in kept.values():
            whole = pa.concat_tables(parts).sort_by([(one, "ascending") for one in key])
            if len(whole):
                writes.append(whole)
        return self.replace(
            name, remove=remove, add=writes or schema.empty_table(), version=version
        )

    # --- upkeep ---------------------------------------------------------------------------------

    def optimize(self, name: str) -> dict[str, Any]:
        """Put small files of a table together."""
        table = self._table(name)
        if table is None:
            raise ConfigError(f"{self.files_of_lake.root} has no table {name}")
        done: dict[str, Any] = table.optimize.compact()
        table.update_incremental()
        return done

    def compact(
        self, name: str, *, order_by: Sequence[str], partition_by: str | None, rows_per_file: int
    ) -> int:
        """Put small files of a table that is merged by key together, sorted; return how many.

        Delta's own OPTIMIZE would mix values of `partition_by` in a file, and `merge` would have
        to read all of it for each of them.
        """
        small: dict[Any, list[tuple[int, str]]] = {}
        for uri, rows, low, high in self._sizes(name, partition_by or order_by[0]):
            if rows * 2 < rows_per_file:
                value = low if partition_by and low == high else None
                small.setdefault(value, []).append((rows, uri))
        remove: list[str] = []
        add: list[DataFile] = []
        for files in small.values():
            uris = _of_a_size(files)
            remove += uris
            for _, rows in _groups(self.files_of_lake.read(uris), partition_by):
                rows = rows.sort_by([(one, "ascending") for one in order_by])
                add += self._write(name, rows, rows_per_file)
        schema = self.schema(name)
        if remove and schema is not None:
            self.commit(
                name,
                add,
                time.time_ns() // 1_000_000,
                schema=schema,
                remove=remove,
                app=f"{self.app}/optimize",
                is_change=False,
            )
        return len(remove)

    def vacuum(self, name: str, hours: float) -> int:
        """Remove files that no version younger than so many hours names; return how many."""
        table = self._table(name)
        if table is None:
            raise ConfigError(f"{self.files_of_lake.root} has no table {name}")
        return len(
            table.vacuum(
                retention_hours=int(hours),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
        )


def _of_a_size(files: Iterable[tuple[int, str]]) -> list[str]:
    """Choose files to put together, the smallest first, up to one that is many times as large as
    these: to write it again for a few rows costs more than to read two files.

    >>> _of_a_size([(33_000, "a"), (2, "b"), (9, "c"), (1, "d")])
    ['d', 'b', 'c']
    >>> _of_a_size([(33_000, "a"), (9, "b"), (31_000, "c")])
    ['c', 'a']
    """
    chosen: list[str] = []
    total = 0
    for rows, uri in sorted(files):
        if rows > max(total * _TIER, _FEW_ROWS):
            if len(chosen) > 1:
                break
            chosen, total = [], 0
        chosen.append(uri)
        total += rows
    return chosen if len(chosen) > 1 else []


def _actions(table: DeltaTable) -> pa.Table:
    """Return the files of a table, with their statistics."""
    # `pa.table` would import pandas first, which takes a quarter of a second.
    return pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()


def _keys(rows: pa.Table, key: Sequence[str]) -> pa.ChunkedArray | pa.Array:
    """Return the key of each row as one text."""
    columns = [pc.fill_null(rows[one].cast(pa.string()), "\1") for one in key]
    if len(columns) == 1:
        return columns[0].combine_chunks() if rows.num_rows else pa.array([], pa.string())
    joined = pc.binary_join_element_wise(*columns, "\0")
    return joined.combine_chunks() if rows.num_rows else pa.array([], pa.string())


def _groups(rows: pa.Table, column: str | None) -> list[tuple[Any, pa.Table]]:
    if column is None or not len(rows):
        return [(None, rows)] if len(rows) else []
    rows = rows.sort_by(column)
    counts = rows.group_by(column, use_threads=False).aggregate([([], "count_all")])
    found = []
    start = 0
    for value, count in zip(
        counts[column].to_pylist(), counts["count_all"].to_pylist(), strict=True
    ):
        found.append((value, rows.slice(start, count)))
        start += count
    return found
