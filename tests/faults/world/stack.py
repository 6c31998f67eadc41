"""The world: servers, proxies before them, six processes, and somebody who sends commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import redis
from tests.faults import invariants
from tests.faults.invariants import Facts
from tests.faults.proxy import Proxy
from tests.faults.world.process import Process
from tests.faults.world.sender import PARTITIONS, Sender, is_hopeless
from tests.faults.world.service import (
    CONSUMERS,
    DEAD,
    EVENTS,
    GROUP,
    TABLES,
    commands_of,
)

from conquiet import embedded
from conquiet.sql import engine, schema
from conquiet.sql.wal import WalOutbox

ROLES = ("worker-0", "worker-1", "relay-0", "relay-1", "consumer-0", "consumer-1")
VICTIMS = ("worker-0", "relay-0", "consumer-0")
"""The others are never killed: their memory and open files are watched."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
LOGICAL = (
    *("-c", "wal_level=logical", "-c", "max_slot_wal_keep_size=4GB"),
    *("-c", "wal_sender_timeout=10s"),  # then a stopped relay loses the slot to the other
)
CONNECTIONS = 40
STUCK = "ended, so that its rows are free again"
WARM_SAMPLES = 300
"""Seconds: in less time, caches and pools are still being filled."""
_CONNECTIONS = 1.0
"""A pool opens one more when two threads first ask at once, however late; a leak opens many."""


class World:
    """Everything, from the first server to the verdict."""

    def __init__(
        self,
        folder: Path,
        *,
        rate: float,
        messages: int | None,
        proxied: bool,
        trace: Path | None = None,
        read_from: str = "claim",
    ) -> None:
        """Let relays claim rows, or follow the write-ahead log (`read_from="wal"`)."""
        self.folder = folder
        self._trace = {} if trace is None else {"trace": str(trace.resolve())}
        self._rate, self._messages, self._proxied = rate, messages, proxied
        self._read_from = read_from
        self._rows_before, self._written_before = -1, "0/0"
        self._open = contextlib.ExitStack()
        self.disks = {kind: self._small_disk(kind) for kind in ("postgres", "redis")}
        self.postgres = embedded.postgres(
            private=True,
            options=(
                *("-c", f"max_connections={CONNECTIONS}", "-c", "deadlock_timeout=200ms"),
                *(LOGICAL if read_from == "wal" else ()),
            ),
        )
        self.redis = embedded.redis(private=True, options=DURABLE)
        self.proxies: dict[str, Proxy] = {}
        self.processes: dict[str, Process] = {}
        self._server_lock = threading.Lock()
        self._looking = threading.Event()
        self._samples = 0

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> World:
        with self._open:
            for kind, server in (("postgres", self.postgres), ("redis", self.redis)):
                with _temporary(self.disks[kind] or self.folder):
                    self._open.enter_context(server)
            with psycopg.connect(self.postgres.url, autocommit=True) as connection:
                connection.execute(schema.ddl("postgresql") + TABLES)
            with self.client() as client:
                for partition in range(PARTITIONS):
                    stream = commands_of(str(partition))
                    client.xgroup_create(stream, GROUP, id="0", mkstream=True)
                client.xgroup_create(EVENTS, CONSUMERS, id="0", mkstream=True)
            for role in ROLES:
                self._start(role)
            self._open.callback(self._kill_all)
            self.sender = Sender(self.client(), self._rate, self._messages)
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()
            self._open = self._open.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sender.stopping.set()
        self._looking.set()
        self._open.close()

    def client(self) -> redis.Redis:
        """Past the proxies."""
        return redis.Redis(port=self.redis.port, socket_timeout=30.0)

    def _small_disk(self, kind: str) -> Path | None:
        """A disk that can be filled; None if we may not mount one."""
        disk = self.folder / f"disk of {kind}"
        disk.mkdir()
        disk.chmod(0o755)
        mount = ["mount", "-t", "tmpfs", "-o", "size=8g,mode=0755", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            return None
        self._open.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        return disk

    def _start(self, role: str) -> None:
        urls = {"redis": self.redis.url, "postgres": self.postgres.url}
        if self._proxied:
            for kind, server in (("redis", self.redis), ("postgres", self.postgres)):
                if role.startswith("consumer") and kind == "postgres":
                    continue
                name = f"{role.partition('-')[0]} {kind}"
                if name not in self.proxies:
                    self.proxies[name] = self._open.enter_context(Proxy(server.port))
                port = self.proxies[name].port
                urls[kind] = urls[kind].replace(f":{urlsplit(urls[kind]).port}/", f":{port}/")
        config = self.folder / f"{role}.json"
        config.write_text(
            json.dumps({**urls, **self._trace, "folder": str(self.folder), "from": self._read_from})
        )
        process = Process(role, config, self.folder, self.folder / f"{role}.log")
        self.processes[role] = process
        process.start()

    def _look(self) -> None:
        while not self._looking.wait(0.05):
            self._samples += 1
            for process in self.processes.values():
                with process.lock:
                    process.look(sample=self._samples % 20 == 0)

    def _kill_all(self) -> None:
        self._looking.set()
        self._watch.join(10)
        for process in self.processes.values():
            if process.popen is not None:
                process.popen.kill()
                process.popen.wait()

    # --- servers ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def server_down(self, kind: str) -> Iterator[None]:
        """PostgreSQL by an immediate shutdown, Redis by SIGKILL; started again at the end."""
        with self._server_lock:
            if kind == "postgres":
                self.postgres.stop(keep=True, mode="immediate")
            elif self.redis.running:
                self.redis.kill()
            try:
                yield
            finally:
                self.revive()

    def revive(self) -> None:
        for server in (self.postgres, self.redis):
            if not server.running:
                server.restart()

    @contextlib.contextmanager
    def full_disk(self, kind: str) -> Iterator[None]:
        """Until the end of the block nothing more can be written where a server writes."""
        disk = self.disks[kind]
        assert disk is not None
        filler = disk / "filler"
        with self._server_lock:
            try:
                _fill(filler)
                yield
            finally:
                filler.unlink(missing_ok=True)
                self.revive()

    # --- the end ------------------------------------------------------------------------------

    def drain(self, seconds: float) -> list[str]:
        """Wait until nothing is left to do; gives what is left if that does not come."""
        end = time.monotonic() + seconds
        left = ["everything"]
        while left and time.monotonic() < end:
            time.sleep(0.5)
            try:
                left = self.left()
            except (redis.RedisError, psycopg.Error) as error:
                left = [f"the servers, which do not answer: {error}"]
        return left

    def left(self) -> list[str]:
        with self.client() as client:
            found = [
                name
                for partition in range(PARTITIONS)
                for name in invariants.unsettled_entries(client, commands_of(str(partition)), GROUP)
            ]
            rows = self._unpublished()
            found += [f"{rows} rows of the outbox"] if rows else []
            return found + invariants.unsettled_entries(client, EVENTS, CONSUMERS)

    def _unpublished(self) -> int:
        """Count the rows that wait; from the log, all of them until the position is behind them."""
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            if self._read_from != "wal":
                query = "SELECT count(*) FROM outbox WHERE published_at IS NULL"
                [(waiting,)] = connection.execute(query).fetchall()
                return int(waiting)
            query = (
                "SELECT count(*), count(*) FILTER (WHERE last_error IS NOT NULL"
                " AND published_at IS NULL) FROM outbox"
            )
            [(rows, deferred)] = connection.execute(query).fetchall()
            query = (
                "SELECT pg_current_wal_insert_lsn()::text, EXISTS (SELECT FROM pg_replication_slots"
                " WHERE confirmed_flush_lsn >= %s::pg_lsn)"
            )
            [(written, is_behind)] = connection.execute(query, (self._written_before,)).fetchall()
        # The position is behind these rows if there were as many at the look before.
        is_done = is_behind and rows == self._rows_before
        self._rows_before, self._written_before = rows, written
        return int(deferred) if is_done else int(rows)

    def transactions(self) -> list[str]:
        """Those that are open in PostgreSQL, by processes that live."""
        with psycopg.connect(self.postgres.url) as connection:
            return invariants.sessions_left(connection)

    def ended(self) -> list[str]:
        """Processes that were not killed, and ended; each was started again.

        A relay whose batch hangs for too long does so, and says it: that is promised.
        """
        return [
            f"{role} ended by itself, with {process.ended}: {_tail(process.log)}"
            for role, process in self.processes.items()
            if len(process.ended) > _text(process.log).count(STUCK)
        ]

    def stop(self) -> list[str]:
        """End all processes in good order; gives those that did not."""
        self._looking.set()
        self._watch.join(10)
        wrong = []
        processes = [p for p in self.processes.values() if p.popen is not None]
        for process in processes:
            process.popen.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
            process.popen.terminate()  # type: ignore[union-attr]
        for process in processes:
            try:
                code = process.popen.wait(30)  # type: ignore[union-attr]
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                words = _tail(process.log)
                wrong.append(f"{process.role} ended with {code} when it was told to stop: {words}")
        return wrong

    def facts(self) -> Facts:
        """By raw drivers, when all processes have ended."""
        sent = range(self.sender.sent)
        hopeless = frozenset(f"c-{number}" for number in sent if is_hopeless(number))
        facts = Facts(frozenset(f"c-{number}" for number in sent), hopeless, Counter())
        facts.ordered = True
        if self._read_from == "wal":  # marks the rows that are behind the position
            made = engine(self.postgres.url)
            WalOutbox(made).leave(lambda seconds: True)
            made.dispose()
            self._read_from = "claim"
        with psycopg.connect(self.postgres.url) as connection:
            invariants.read_sql(connection, facts)
            facts.locked = invariants.sessions_left(connection)
        with self.client() as client:
            facts.log = invariants.read_log(client, EVENTS)
            facts.consumed = invariants.read_counts(client, "consumed")
            facts.locked += invariants.held_leases(client)
            dead = {fields[b"id"].decode() for _, fields in client.xrange(DEAD)}
        facts.unsettled = self.left()
        facts.unsettled += [f"{name}, a dead letter for no reason," for name in dead - hopeless]
        facts.unsettled += [f"{name}, no dead letter," for name in hopeless - dead]
        return facts

    def growing(self) -> list[str]:
        """Of those that were never killed, whose memory or open files grow."""
        found = []
        for role in sorted(set(ROLES) - set(VICTIMS)):
            process = self.processes[role]
            if process.ended:
                continue
            watched = {"memory": (process.memory, 0.0), "open files": (process.files, _CONNECTIONS)}
            for what, (series, least) in watched.items():
                slack = 0.1 if len(series) > WARM_SAMPLES else 0.25
                if not invariants.is_flat(series, slack, least):
                    found.append(f"{what} of {role} grows: {series[:: max(1, len(series) // 12)]}")
        return found


@contextlib.contextmanager
def _temporary(place: Path) -> Iterator[None]:
    """Servers make their directories where the temporary ones are."""
    before, tempfile.tempdir = tempfile.tempdir, str(place)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _tail(log: Path) -> str:
    return _text(log)[-500:]


def _fill(path: Path) -> None:
    """Take all the room there is."""
    with contextlib.suppress(OSError), path.open("wb") as file:
        room = os.statvfs(path.parent)
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        while True:
            file.write(b"\0" * 4096)
            file.flush()


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
