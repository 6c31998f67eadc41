"""Log: an event log in this process, with groups, leases and replay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from conquiet.acking import Error
from conquiet.codec import encode_data
from conquiet.errors import ConfigError, ConquietError, SinkUnavailable
from conquiet.memory.group import Entry, Group
from conquiet.memory.source import LogSource
from conquiet.message import Message

Start = Literal["beginning", "now"]


class Log:
    """Messages in the order in which they were published; they stay after they were read.

    >>> log = Log()
    >>> log.sink("orders").publish([Message(b"{}", {"id": "1", "type": "order.placed"})])
    [None]
    >>> [message] = log.source("billing").read(limit=10, timeout=0)
    >>> message.topic, message.ack()
    ('orders', True)

    `clock` tells when a lease ends; a test can pass its own and read with `timeout=0`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self._entries: list[Entry] = []
        self._groups: dict[str, Group] = {}

    def sink(self, topic: str | None = None) -> LogSink:
        """Publishes to this log; `topic` is for messages that name none."""
        return LogSink(self, topic)

    def source(
        self,
        group: str,
        *,
        topics: Collection[str] | None = None,
        lease: float = 30.0,
        start: Start = "beginning",
        ordered: bool = False,
    ) -> LogSource:
        """A consumer in a group. Groups are independent; the sources of one group compete.

        `topics`, `start` and `ordered` belong to the group: its first source decides them.
        `ordered` holds a message back while an earlier one of its key is being worked on.
        """
        return LogSource(self, self._group(group, topics, start, ordered), lease)

    def _group(
        self, name: str, topics: Collection[str] | None, start: Start, ordered: bool
    ) -> Group:
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r}: give a list of topics")
        if start not in ("beginning", "now"):
            raise ConfigError(f"start={start!r}: a group starts at the 'beginning' or 'now'")
        wanted = None if topics is None else frozenset(topics)
        with self.changed:
            group = self._groups.get(name)
            if group is None:
                first = 0 if start == "beginning" else len(self._entries)
                group = self._groups[name] = Group(self._entries, first, wanted, ordered)
            if (group.topics, group.ordered) != (wanted, ordered):
                raise ConfigError(
                    f"group {name!r} exists with topics={group.topics and sorted(group.topics)}"
                    f" and ordered={group.ordered}; use the same, or another group"
                )
            return group

    def append(self, messages: Sequence[Message[Any]]) -> None:
        """Publish all of them or, if the data of one cannot be written, none."""
        encoded = [encode_data(message) for message in messages]
        with self.changed:
            for message, data in zip(messages, encoded, strict=True):
                position = len(self._entries) + 1
                self._entries.append(Entry(position, data, dict(message.attributes), message.topic))
            self.changed.notify_all()

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """What was published from position `start` to `end`, both inclusive.

        A message's position is `message.locals["position"]`. No group moves.
        """
        first = 1 if start is None else _position(start)
        last = len(self._entries) if end is None else _position(end)
        for entry in self._entries[max(first - 1, 0) : last]:
            yield entry.message()

    def unsettled(self, group: str) -> list[Message[Any]]:
        """What the group has not acked yet; all of the log if it never read."""
        with self.changed:
            known = self._groups.get(group)
            entries = list(self._entries) if known is None else known.unsettled()
        return [entry.message() for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)


class LogSink:
    """Publishes to a log; can be told to fail, to test what happens then."""

    def __init__(self, log: Log, topic: str | None = None) -> None:
        self._log = log
        self._topic = topic
        self._failures = 0

    def fail_next(self, times: int = 1) -> None:
        """Let the next `times` calls of `publish` raise `SinkUnavailable`; 0 ends it."""
        self._failures = times

    def publish(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        if self._failures > 0:
            self._failures -= 1
            raise SinkUnavailable("the log was told to be out of reach (fail_next)")
        return [self._publish(message) for message in messages]

    def _publish(self, message: Message[Any]) -> Error:
        sent = Message(message.data, message.attributes, topic=message.topic or self._topic)
        try:
            self._log.append([sent])
        except ConquietError as error:
            return error
        return None

    def close(self) -> None:
        """Nothing is buffered."""


def _position(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r:.60} is not a position; use message.locals['position']")
    return int(text)
