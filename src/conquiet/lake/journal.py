"""Journal: how far each batch has come, in files below `_pipeline` of the lake.

    judge ─▶ JUDGED ─▶ commits of silver                         one `batches/N.json` per batch
    fold ─▶ FOLDED ─▶ commits of facts ─▶ SQL tables ─▶ APPLIED   `refresh.json`, several batches

A record is written whole or not at all, after the files that it names. Whatever a kill leaves
behind, the next start goes on from the last record; commits that a table has already are skipped by
their application transaction.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
import uuid
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from conquiet.errors import ConfigError, ConquietError
from conquiet.lake.tables import DataFile, Files
from conquiet.lease import LeaseKeeper

if TYPE_CHECKING:
    from deltalake import DeltaTable

logger = logging.getLogger("conquiet.lake")

FOLDER = "_pipeline"
_LEASE_SECONDS = 60.0
_RENEW_SECONDS = _LEASE_SECONDS / 4
_KEPT_LEASES = "interval 1 hours"
_colour = re.compile(r"\x1b\[[0-9;]*m")


class LeaseLost(ConquietError):
    """A driver could not renew its lease of a lake in an object store."""


class Batch(msgspec.Struct):
    """One batch of entries, whose files are written."""

    number: int
    """Counts the batches of the lake; the version of its commits."""
    query: str
    batch: int
    """The number that its query gave it."""
    files: dict[str, list[DataFile]] = msgspec.field(default_factory=dict)
    """The files of each table."""
    remove: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """URIs of files that the commit of a table removes."""
    changes: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """URIs of files with removed and added rows, where a batch does more than add rows."""
    feed: list[Feed] = msgspec.field(default_factory=list)
    rebuild: bool = False
    """Whether facts are made again from all events."""

    def add(self, table: str, *files: DataFile) -> None:
        """Enter files that the commit of a table adds."""
        self.files.setdefault(table, []).extend(files)

    def drop(self, table: str, *uris: str) -> None:
        """Enter files that the commit of a table removes."""
        self.remove.setdefault(table, []).extend(uris)

    def change(self, table: str, *uris: str) -> None:
        """Enter files of changes: they, and not its new files, are what changed in a table."""
        self.changes.setdefault(table, []).extend(uris)


class Feed(msgspec.Struct):
    """A file of events for facts; the rows of each bucket are one record batch."""

    file: str
    buckets: dict[int, int]
    """The record batch of each bucket."""
    rows: dict[int, int]


class States(msgspec.Struct):
    """A file of states; the states of each fact and bucket are one record batch, by key hash."""

    file: str
    parts: dict[str, dict[int, int]]
    """The record batch of each bucket, by fact."""
    rows: int


class Folded(msgspec.Struct):
    """A refresh whose files are written."""

    through: int
    """The last batch that it applies."""
    levels: list[list[States]]
    changes: dict[str, list[str]]
    """URIs of files with removed and added rows, by table."""
    replace: bool = False
    """Whether the tables of facts are replaced as a whole."""
    counts: list[DataFile] = msgspec.field(default_factory=list)
    """Files of `expectations` with the counts of rules over rows."""


class Refresh(msgspec.Struct):
    """What facts and SQL tables hold."""

    through: int = -1
    levels: list[list[States]] = msgspec.field(default_factory=list)
    """Files of states, the newest level first."""
    facts: list[str] = msgspec.field(default_factory=list)
    """The facts that these states are of."""
    queries: dict[str, str] = msgspec.field(default_factory=dict)
    """A hash of the definition of each mart and query, as its table was made by."""
    folded: Folded | None = None


class Journal:
    """The records of a lake."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.batches: dict[int, Batch] = {}
        """Batches that facts do not have yet, and the last one of each query."""
        self.refresh = Refresh()

    def load(self) -> None:
        text = self._files.get(f"{FOLDER}/refresh.json")
        self.refresh = Refresh() if text is None else msgspec.json.decode(text, type=Refresh)
        self.batches = {}
        for name in self._files.list(f"{FOLDER}/batches"):
            if name.endswith(".json"):
                found = self._files.get(f"{FOLDER}/batches/{name}")
                batch = msgspec.json.decode(found or b"", type=Batch)
                self.batches[batch.number] = batch

    @property
    def next_number(self) -> int:
        return max([self.refresh.through, *self.batches], default=-1) + 1

    @property
    def pending(self) -> list[Batch]:
        """Batches that facts and SQL tables do not have yet."""
        found = [one for number, one in sorted(self.batches.items())]
        return [one for one in found if one.number > self.refresh.through]

    def find(self, query: str, batch: int) -> Batch | None:
        """Return the record of a query's batch, if there is one."""
        for one in self.batches.values():
            if one.query == query and one.batch == batch:
                return one
        return None

    def last_of(self, query: str) -> int:
        return max((one.batch for one in self.batches.values() if one.query == query), default=-1)

    def write(self, batch: Batch) -> None:
        self.batches[batch.number] = batch
        name = f"{FOLDER}/batches/{batch.number:010}.json"
        self._files.put(name, msgspec.json.encode(batch))

    def write_refresh(self, refresh: Refresh) -> None:
        self.refresh = refresh
        self._files.put(f"{FOLDER}/refresh.json", msgspec.json.encode(refresh))

    def forget(self) -> None:
        """Remove records that are applied, but for the last of each query."""
        last = {one.query: one.number for _, one in sorted(self.batches.items())}
        gone = [
            one
            for one in self.batches.values()
            if one.number <= self.refresh.through and last[one.query] != one.number
        ]
        for one in gone:
            del self.batches[one.number]
            self._files.remove(f"{FOLDER}/batches/{one.number:010}.json")


class Lock:
    """One driver per lake: a lock of the operating system on a local disk, which ends with the
    process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptor: int | None = None

    def acquire(self) -> None:
        os.makedirs(self._files.uri(FOLDER), exist_ok=True)
        descriptor = os.open(self._files.uri(FOLDER, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "?"
            os.close(descriptor)
            raise ConfigError(
                f"the lake {self._files.root} is in use by process {holder}: stop it, or name"
                " another lake"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def check(self) -> None:
        """Raise if the lock was lost; that of the operating system never is."""

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Lease(Lock):
    """One driver per lake in an object store: a lease that is refused while another driver renews
    it.

    It is the last commit of a Delta table without rows. A commit is a conditional put: of two
    drivers that take the lease at once, one is refused.
    """

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._owner = uuid.uuid4().hex
        self._until = 0.0
        self._is_held = False
        self._one_commit = threading.Lock()  # of two at once, the store would refuse one
        self._keeper = LeaseKeeper("conquiet-lake")

    def __repr__(self) -> str:
        return f"the lease of {self._files.root}"

    def acquire(self) -> None:
        try:
            self._commit(_LEASE_SECONDS)
        except OSError as error:  # delta-rs writes its causes below each other, in colours
            text = " ".join(_colour.sub("", str(error)).split())
            raise ConfigError(f"the lake {self._files.root} cannot be used: {text:.700}") from error
        self._is_held = True
        self._keeper.add(self, _RENEW_SECONDS)

    def renew(self) -> float | None:
        """Renew it, as its keeper asks; if none succeeds until it ends, `check` ends the driver."""
        with self._one_commit:
            if not self._is_held:
                return None
            self._commit(_LEASE_SECONDS)
        return _RENEW_SECONDS

    def _commit(self, seconds: float) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        table = self._table()
        # The newest comes first; there are more than one if another driver has just committed. Then
        # the commit below is refused, as it is for the version after that of `table`.
        last = table.history(1)[0]
        left = float(last.get("until", 0)) - time.time()
        if last.get("owner") not in (None, self._owner) and left > 0:
            raise ConfigError(
                f"the lake {self._files.root} is in use by another driver ({last.get('host')}):"
                f" stop it, or wait {left:.0f} s for its lease to end"
            )
        until = time.time() + seconds
        record = {"owner": self._owner, "until": str(until)}
        record["host"] = f"{os.uname().nodename}:{os.getpid()}"
        try:
            table.create_write_transaction(
                [],
                "append",
                table.schema(),
                [],
                commit_properties=CommitProperties(
                    custom_metadata=record,
                    app_transactions=[Transaction("lease", table.version() + 1)],
                    max_commit_retries=0,
                ),
            )
        except CommitFailedError as error:
            raise ConfigError(
                f"the lake {self._files.root} was taken by another driver at this moment: stop it,"
                f" or wait {_LEASE_SECONDS:.0f} s for its lease to end"
            ) from error
        self._until = until

    def _table(self) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake import Schema as DeltaSchema

        uri, options = self._files.uri(FOLDER, "lease"), self._files.options
        if not DeltaTable.is_deltatable(uri, options):
            columns = DeltaSchema.from_arrow(pa.schema([("owner", pa.string())]))
            kept = {"delta.checkpointInterval": "50", "delta.logRetentionDuration": _KEPT_LEASES}
            DeltaTable.create(
                uri, columns, mode="ignore", storage_options=options, configuration=kept
            )
        return DeltaTable(uri, storage_options=options)

    def check(self) -> None:
        """Raise if the lease has ended: another driver may have it."""
        if time.time() > self._until:
            raise LeaseLost(
                f"the lease of {self._files.root} has ended, since it could not be renewed; another"
                " driver may write the lake now. Start again"
            )

    def release(self) -> None:
        self._keeper.remove(self)
        try:
            with self._one_commit:
                self._is_held = False
                if time.time() < self._until:
                    self._commit(0.0)
        except Exception as error:  # noqa: BLE001 - the batches are committed
            logger.warning(
                "could not release the lease of %s, which ends in %.0f s: %s",
                self._files.root,
                self._until - time.time(),
                error,
            )
