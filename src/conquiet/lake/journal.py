"""Journal: how far each batch has come, in files below `_pipeline` of the lake.

    take ─▶ TAKEN ─▶ judge ─▶ JUDGED ─▶ commits of silver       one `batches/N.json` per batch
    fold ─▶ FOLDED ─▶ commits of facts ─▶ SQL tables ─▶ APPLIED   `refresh.json`, several batches

A record is written whole or not at all, after the files that it names. Whatever a kill leaves
behind, the next start goes on from the last record; commits that a table has already are skipped by
their application transaction.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import uuid
from typing import Any, Literal

import msgspec

from conquiet.errors import ConfigError
from conquiet.lake.tables import DataFile, Files

logger = logging.getLogger("conquiet.lake")

FOLDER = "_pipeline"
_LEASE_SECONDS = 60.0


class Plan(msgspec.Struct):
    """Which rows of a file of `raw_events` are first deliveries."""

    file: str
    rows: int
    skip: bytes = b""
    """Row numbers of redeliveries, as int32."""
    again: bytes = b""
    """Row numbers of first deliveries that came several times, as int32 …"""
    counts: bytes = b""
    """… and how often, as int32."""


class Batch(msgspec.Struct):
    """One batch of entries."""

    number: int
    """Counts the batches of the lake; the version of its commits."""
    query: str
    batch: int
    """The number that its query gave it."""
    step: Literal["taken", "judged"] = "taken"
    raw: list[DataFile] = msgspec.field(default_factory=list)
    plans: list[Plan] = msgspec.field(default_factory=list)
    files: dict[str, list[DataFile]] = msgspec.field(default_factory=dict)
    """The files of each table."""
    remove: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """URIs of files that the commit of a table removes."""
    changes: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """URIs of files with removed and added rows, where a batch does more than add rows."""
    feed: list[Feed] = msgspec.field(default_factory=list)
    rebuild: bool = False
    """Whether facts are made again from all events."""


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

    def forget(self) -> list[Batch]:
        """Remove records that are applied, but for the last of each query; return them."""
        last = {one.query: one.number for _, one in sorted(self.batches.items())}
        gone = [
            one
            for one in self.batches.values()
            if one.number <= self.refresh.through and last[one.query] != one.number
        ]
        for one in gone:
            del self.batches[one.number]
            self._files.remove(f"{FOLDER}/batches/{one.number:010}.json")
        return gone


class Lock:
    """One driver per lake: a lock of the operating system on a local disk; in an object store a
    lease that is refused while another driver renews it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._owner = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        if not self._files.is_local:
            self._lease()
            self._released.clear()
            threading.Thread(target=self._renew, daemon=True).start()
            return
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

    def _lease(self) -> None:
        held: dict[str, Any] = msgspec.json.decode(self._files.get(f"{FOLDER}/lock") or b"{}")
        age = time.time() - held.get("at", 0)
        if held.get("owner") not in (None, self._owner) and age < _LEASE_SECONDS:
            raise ConfigError(
                f"the lake {self._files.root} is in use by another driver ({held.get('host')}):"
                f" stop it, or wait {_LEASE_SECONDS - age:.0f} s for its lease to end"
            )
        self._write_lease(time.time())

    def _write_lease(self, at: float) -> None:
        record = {"owner": self._owner, "at": at, "host": f"{os.uname().nodename}:{os.getpid()}"}
        self._files.put(f"{FOLDER}/lock", msgspec.json.encode(record))

    def _renew(self) -> None:
        """Keep the lease while a batch takes long; the lock of a local disk needs no renewal."""
        while not self._released.wait(_LEASE_SECONDS / 4):
            try:
                self._lease()
            except Exception as error:  # noqa: BLE001 - Delta refuses the commits of a second driver
                logger.error("could not renew the lease of %s: %s", self._files.root, error)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        elif not self._files.is_local:
            self._released.set()
            self._write_lease(0.0)
