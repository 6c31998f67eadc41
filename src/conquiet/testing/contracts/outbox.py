"""The contract of an outbox and of the source that a relay reads it by."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import pytest

from conquiet.errors import SinkUnavailable
from conquiet.handler import Process, Result
from conquiet.message import Message
from conquiet.outbox import Outbox
from conquiet.source import Source
from conquiet.stage import Middleware
from conquiet.testing import deliver, eventually
from conquiet.testing.contracts.samples import ATTRIBUTES, PAYLOADS, content, ids, make_messages
from conquiet.testing.contracts.transaction import HandlerFailed, StorageContract


class OutboxContract(StorageContract):
    """An outbox stores events with the effects, or not at all, and returns them unchanged.

    Binding: see `StorageContract`. Must also be given: `outbox`, `relay`. As needed:
    `ordered_relay`, `one_relay_at_a_time`, `redelivery_within`. `SourceContract` can be bound to
    the relay as well.
    """

    bindings = StorageContract.bindings | {
        "outbox",
        "relay",
        "ordered_relay",
        "one_relay_at_a_time",
        "redelivery_within",
    }

    redelivery_within: float = 5.0
    """By when at most what was nacked, or held at close, can be read again."""

    one_relay_at_a_time: bool = False
    """True if a relay that holds events keeps the others waiting, as on SQLite."""

    @abstractmethod
    def outbox(self, topic: str) -> Outbox:
        """Return the middleware, over the storage of `transaction`."""

    @abstractmethod
    def relay(self) -> Source:
        """Return the source of a relay: all committed events, neither acked nor in flight."""

    def ordered_relay(self) -> Source:
        """Return a relay that publishes the events of one key one relay at a time, in order."""
        pytest.skip("this outbox has no relay that is ordered by key")

    def chain(self) -> list[Middleware]:
        return [self.transaction(), self.outbox("orders")]

    # --- storing ----------------------------------------------------------------------------

    def test_outputs_become_rows_and_leave_the_chain(self) -> None:
        delivered = deliver(self.router(run=_one_event), *make_messages(1))
        assert delivered.outputs == []
        assert ids(delivered.acked) == ["m-0"]
        assert ids(self._read(1)) == ["m-0/0"]

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_bytes_and_attributes_come_out_as_they_went_in(self, payload: bytes) -> None:
        event = Message(payload, {**ATTRIBUTES, "id": "ünï-1", "time": "2026-01-31T12:00:00Z"})
        deliver(self.router(run=lambda item: [event]), *make_messages(1))
        [got] = self._read(1)
        assert content(got) == content(event)
        assert (got.topic, got.key, got.deliveries) == ("orders", "customer-7", 1)

    def test_typed_data_is_stored_as_json(self) -> None:
        event = Message({"order": 7}, {"type": "order.placed"})
        deliver(self.router(run=lambda item: [event]), *make_messages(1))
        [got] = self._read(1)
        assert (got.data, got.type, got.source) == (b'{"order":7}', "order.placed", "/contract")
        assert got.id

    def test_an_event_that_names_a_topic_goes_there(self) -> None:
        def two(item: Message[Any]) -> list[Message[Any]]:
            named, plain = make_messages(2, "event")
            named.topic = "audit"
            return [named, plain]

        deliver(self.router(run=two), *make_messages(1))
        assert [event.topic for event in self._read(2)] == ["audit", "orders"]

    def test_events_keep_their_order_within_and_across_batches(self) -> None:
        router = self.router(run=_three_events)
        expected = []
        for batch in (make_messages(4, "first"), make_messages(4, "second")):
            deliver(router, *batch)
            expected += [f"{name}/{number}" for name in ids(batch) for number in range(3)]
        assert ids(self._read(24)) == expected

    def test_a_failed_handler_leaves_no_row_and_no_effect(self) -> None:
        deliver(self.router(run=_one_event), *make_messages(1, "bad"), *make_messages(1))
        assert ids(self._read_all()) == ["m-0/0"]
        assert self.effects("bad-0", "m-0") == [0, 1]

    def test_what_fails_after_the_outbox_leaves_no_row_and_no_effect(self) -> None:
        def fail_late(next: Process) -> Process:
            def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
                next(batch)
                raise HandlerFailed

            return process

        router = self.router(self.transaction(), fail_late, self.outbox("orders"), run=_one_event)
        assert len(deliver(router, *make_messages(2)).nacked) == 2
        assert self._read_all() == []
        assert self.effects("m-0", "m-1") == [0, 0]

    def test_an_event_that_cannot_be_written_fails_its_message_alone(self) -> None:
        def one(item: Message[Any]) -> list[Message[Any]]:
            data: Any = object() if item.id == "m-1" else b""
            return [Message(data, {"type": "event", "id": item.id})]

        delivered = deliver(self.router(run=one), *make_messages(3))
        assert ids(delivered.nacked) == ["m-1"]
        assert ids(self._read_all()) == ["m-0", "m-2"]
        assert self.effects("m-0", "m-1", "m-2") == [1, 0, 1]

    def test_one_failing_message_of_a_batch_leaves_the_others_events_once_and_in_order(
        self,
    ) -> None:
        batch = [*make_messages(2), *make_messages(1, "bad"), *make_messages(2, "n")]
        deliver(self.router(run=_one_event), *batch)
        assert ids(self._read_all()) == ["m-0/0", "m-1/0", "n-0/0", "n-1/0"]

    def test_an_outage_leaves_no_row(self) -> None:
        with self.outage():
            delivered = deliver(self.router(run=_one_event), *make_messages(2))
        assert len(delivered.nacked) == 2
        router = self.router(run=_one_event)
        eventually(lambda: deliver(router, *make_messages(1, "later")).acked, timeout=30)
        assert ids(self._read_all()) == ["later-0/0"]

    # --- relaying ---------------------------------------------------------------------------

    def test_what_was_acked_is_published_and_does_not_come_again(self) -> None:
        self._emit(5)
        relay = self._relay()
        for event in self._take(relay, 5)[:3]:
            event.ack()
        relay.close()
        assert ids(self._read(2)) == ["m-3/0", "m-4/0"]
        assert self._read_all() == []

    def test_what_was_nacked_stays_and_counts_its_attempts(self) -> None:
        self._emit(2)
        relay = self._relay()
        for event in self._take(relay, 2):
            event.nack(ValueError("refused") if event.id == "m-0/0" else SinkUnavailable("down"))
        relay.close()
        assert {event.id: event.deliveries for event in self._read(2)} == {"m-0/0": 2, "m-1/0": 1}

    def test_a_row_in_flight_is_not_emitted_again(self) -> None:
        self._emit(3)
        first, second = self._relay(), self._relay()
        held = self._take(first, 2)
        if not self.one_relay_at_a_time:
            assert ids(self._take(second, 1)) == ["m-2/0"]
        assert ids(second.read(10, 0.2)) == []
        assert len(held) == 2

    def test_two_relays_publish_every_row_once_between_them(self) -> None:
        self._emit(40)
        relays = self._relay(), self._relay()
        published: list[str] = []
        end = time.monotonic() + 30
        while len(published) < 40 and time.monotonic() < end:
            batches = [relay.read(3, 0.05) for relay in relays]
            for event in chain.from_iterable(batches):
                published.append(event.id)
                event.ack()
        assert sorted(published) == sorted(f"m-{number}/0" for number in range(40))
        assert self._read_all() == []

    def test_a_stuck_key_blocks_only_itself(self) -> None:
        if self.one_relay_at_a_time:
            pytest.skip("one relay at a time keeps every key in order, and blocks them all")
        first, second = self._open_ordered(), self._open_ordered()
        for number, key in enumerate("abab"):
            deliver(
                self.router(run=_one_event), *make_messages(1, f"{key}{number}", partitionkey=key)
            )
        [held] = self._take(first, 1)
        assert held.key == "a"
        assert ids(self._take(second, 2)) == ["b1-0/0", "b3-0/0"]
        assert ids(second.read(10, 0.2)) == []
        held.nack(ValueError("refused"))
        assert ids(self._take(first, 2)) == ["a0-0/0", "a2-0/0"]

    # --- inside -----------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _close_relays(self) -> Iterator[None]:
        self._opened: list[Source] = []
        yield
        for relay in self._opened:
            with suppress(Exception):  # its server may be gone
                relay.close()

    def _relay(self) -> Source:
        relay = self.relay()
        self._opened.append(relay)
        return relay

    def _open_ordered(self) -> Source:
        relay = self.ordered_relay()
        self._opened.append(relay)
        return relay

    def _emit(self, count: int) -> None:
        assert len(deliver(self.router(run=_one_event), *make_messages(count)).acked) == count

    def _take(self, relay: Source, count: int) -> list[Message[Any]]:
        taken: list[Message[Any]] = []
        end = time.monotonic() + self.redelivery_within
        while len(taken) < count and time.monotonic() < end:
            taken.extend(relay.read(count - len(taken), 0.1))
        assert len(taken) == count, f"read {ids(taken)}, expected {count} events"
        return taken

    def _read(self, count: int) -> list[Message[Any]]:
        """Publish exactly `count` events, and find no others."""
        relay = self._relay()
        taken = self._take(relay, count)
        for event in taken:
            event.ack()
        assert ids(relay.read(10, 0.1)) == []
        relay.close()
        return taken

    def _read_all(self) -> list[Message[Any]]:
        """Publish what is there now."""
        relay = self._relay()
        taken: list[Message[Any]] = []
        while batch := relay.read(100, 0.3):
            taken.extend(batch)
            for event in batch:
                event.ack()
        relay.close()
        return taken


def _one_event(item: Message[Any]) -> list[Message[Any]]:
    return _events(item, 1)


def _three_events(item: Message[Any]) -> list[Message[Any]]:
    return _events(item, 3)


def _events(item: Message[Any], count: int) -> list[Message[Any]]:
    attributes = {"type": "event"}
    if item.key:
        attributes["partitionkey"] = item.key
    return [
        Message(b"%d" % number, {**attributes, "id": f"{item.id}/{number}"})
        for number in range(count)
    ]
