"""Watching: how far workers and relays have come; and the kill, while there is still much to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from conquiet.errors import ConquietError
from marketplace.demo.process import Child
from marketplace.demo.sending import Sender
from marketplace.demo.servers import STREAMS, Servers
from marketplace.demo.settings import GROUP, PROCESSES
from marketplace.demo.story import Teller
from marketplace.demo.timeline import Kill
from marketplace.demo.world import World

_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 120.0
_KILL_AT = 0.4
"""The share of commands that are handled when a worker is killed; half of them are sent by then."""
_VICTIM = 0


class Stuck(ConquietError):
    """Nothing has moved for a long time."""


class Watch:
    """Counts from outside: rows of the inbox, rows that are published, what a group has left."""

    def __init__(
        self, servers: Servers, world: World, children: Sequence[Child], teller: Teller
    ) -> None:
        self._connection = servers.connect()
        self._client = servers.client
        self._children = children
        self._teller = teller
        self._commands = len(world.commands)
        self._total = self._commands + world.events.total()
        self.kill: Kill | None = None
        self.began = self.ended = 0.0
        """Seconds of the clock: the first command was sent, the last event published."""

    def run(self, sender: Sender) -> None:
        """Send, kill, wait until all is done."""
        try:
            self._wait(lambda: len(self._processes()) > 1, "the workers do not start")
            self.began = time.time()
            sender.send_half()
            self._wait(
                lambda: self._handled() >= self._commands * _KILL_AT, "no command is handled"
            )
            sender.send_rest()
            self._kill()
            self._wait(self._is_taken_over, "nobody takes over from the killed worker")
            self._wait(self._is_done, "not every command was handled, or not every event published")
            self.ended = time.time()
        finally:
            self._connection.close()
            self._client.close()

    def _kill(self) -> None:
        victim, _ = self._processes()[_VICTIM]
        os.kill(victim, signal.SIGKILL)
        self.kill = Kill(_VICTIM + 1, victim, time.time())
        self._teller.end(f"worker {_VICTIM + 1}, process {victim}, is killed by SIGKILL")

    def _is_taken_over(self) -> bool:
        assert self.kill is not None
        pid, ms = self._processes()[_VICTIM]
        if pid == self.kill.pid:
            return False
        self.kill = Kill(self.kill.worker, self.kill.pid, self.kill.at, pid, ms / 1_000)
        after = self.kill.replaced_at - self.kill.at
        self._teller.end(f"process {pid} has taken over its work after {after:.1f} s")
        return True

    def _processes(self) -> dict[int, tuple[int, int]]:
        """The last process of each worker, and when it began."""
        found = {}
        for line in self._client.lrange(PROCESSES, 0, -1):
            slot, pid, ms = map(int, line.split())
            found[slot] = pid, ms
        return found

    def _handled(self) -> int:
        return self._count("SELECT count(*) FROM processed_messages")

    def _published(self) -> int:
        return self._count("SELECT count(*) FROM outbox_events WHERE published_at IS NOT NULL")

    def _count(self, query: str) -> int:
        found: Any = self._connection.execute(query.encode()).fetchone()
        return int(found[0])

    def _is_done(self) -> bool:
        if self._handled() < self._commands:
            return False
        waiting = "SELECT count(*) FROM outbox_events WHERE published_at IS NULL"
        return all(map(self._is_read, STREAMS)) and self._count(waiting) == 0

    def _is_read(self, stream: str) -> bool:
        """Duplicates, too, are to be read and acked."""
        last = self._client.xinfo_stream(stream)["last-generated-id"]
        [state] = [g for g in self._client.xinfo_groups(stream) if g["name"] == GROUP.encode()]
        return bool(state["pending"] == 0 and state["last-delivered-id"] == last)

    def _wait(self, is_so: Callable[[], bool], trouble: str) -> None:
        before, since = -1, time.monotonic()
        while not is_so():
            for child in self._children:
                child.hear(0.0)  # raises if it has ended
            done = self._handled() + self._published()
            self._teller.progress(done, self._total)
            if done != before:
                before, since = done, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_SECONDS:
                raise Stuck(f"{trouble}: nothing has moved for {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)
