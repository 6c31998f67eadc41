"""The conformance suite over `conquiet.memory`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conquiet.memory import Inbox, Log, LogSink, LogSource, Outbox, Store, Transaction
from conquiet.message import Message
from conquiet.testing.contracts import (
    DelayContract,
    InboxContract,
    OutboxContract,
    PromotionContract,
    SinkContract,
    SourceContract,
    TransactionContract,
    WorkerContract,
)

ALWAYS = 1_000_000


class InLog:
    """A source over a log."""

    lease = 0.25

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.log = Log()

    def open(self, lease: float) -> LogSource:
        return self.log.source("group", lease=lease)

    def open_other_group(self) -> LogSource:
        return self.log.source("other")

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        assert not any(self.log.sink().publish_each(messages))

    def crash(self, source: LogSource) -> None:
        source.crash()


class TestLogSource(InLog, SourceContract):
    pass


class TestLogUnderWorker(InLog, WorkerContract):
    lease = 0.5


class TestLogUnderAsyncWorker(TestLogUnderWorker):
    on_loop = True


class TestLogDelays(InLog, DelayContract):
    lease = 0.5


class TestLogSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.log = Log()
        self.made: list[LogSink] = []

    def open(self) -> LogSink:
        self.made.append(self.log.sink())
        return self.made[-1]

    def list_published(self) -> list[Message[Any]]:
        return list(self.log.replay())

    @contextmanager
    def outage(self) -> Iterator[None]:
        for sink in self.made:
            sink.fail_next(ALWAYS)
        yield
        for sink in self.made:
            sink.fail_next(0)


class InStore:
    """A storage in a store."""

    fails_at = "commit"

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.store = Store()

    def transaction(self) -> Transaction:
        return Transaction(self.store)

    def note(self, key: str) -> None:
        self.store.add(key)

    def read_note(self, key: str) -> int:
        return self.store.get(key, 0)

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.store.fail_next(self.fails_at, ALWAYS)
        yield
        self.store.fail_next(self.fails_at, 0)


class TestTransaction(InStore, TransactionContract):
    def handle(self) -> Callable[[], object]:
        with self.store.transaction() as unit:
            return lambda: unit.change("late", lambda old: 1)


class TestTransactionThatCannotBegin(InStore, TransactionContract):
    fails_at = "begin"


class TestInbox(InStore, InboxContract):
    def inbox(self, subscriber: str) -> Inbox:
        return Inbox(subscriber)

    def clean(self, retention: float) -> None:
        self.store.clean_inbox(retention)


class TestOutbox(InStore, OutboxContract):
    def outbox(self, topic: str) -> Outbox:
        return Outbox(topic)

    def relay(self) -> LogSource:
        return self.store.outbox_source()


class TestDelays(InStore, PromotionContract):
    def outbox(self, topic: str) -> Outbox:
        return Outbox(topic)

    def relay(self) -> LogSource:
        return self.store.outbox_source()

    def cancel(self, id: str) -> bool:
        return self.store.cancel(id)


class TestOrderedOutbox(TestOutbox):
    def relay(self) -> LogSource:
        return self.ordered_relay()

    def ordered_relay(self) -> LogSource:
        return self.store.outbox_source(ordered=True)


class TestOutboxSource(SourceContract):
    """The relay's source keeps the contract of every other source, also when ordered by key."""

    lease = 0.25

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.store = Store()

    def open(self, lease: float) -> LogSource:
        return self.store.outbox_source(lease=lease, ordered=True)

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        with self.store.transaction():
            Outbox("orders").store(messages)

    def crash(self, source: LogSource) -> None:
        source.crash()


def _classes_of_page() -> dict[str, Any]:
    """Run the source and the tests that the page on a source of one's own shows."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "own-source.md").read_text()
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```py(?:thon)?\b[^\n]*\n(.*?)```", page, re.DOTALL):
        exec(block.partition("\nwaiting:")[0], names)  # not the example of a worker
    return names


_page = _classes_of_page()
TestSourceOfThePage = _page["TestMySource"]
TestSourceOfThePageUnderWorker = _page["TestMySourceUnderWorker"]
