"""The contract of an outbox that holds delayed events until they are due."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from conquiet.message import Message
from conquiet.outbox import Outbox
from conquiet.source import Source
from conquiet.stage import Middleware
from conquiet.testing import deliver
from conquiet.testing.contracts.samples import ATTRIBUTES, PAYLOADS, content, ids, make_messages
from conquiet.testing.contracts.transaction import StorageContract

_SOON = timedelta(seconds=0.2)
_FAR = timedelta(hours=1)
_LIMIT_SECONDS = 60.0


class PromotionContract(StorageContract):
    """A delayed event is stored with the effects, and published once, when it is due.

    Binding: see `StorageContract`. Must also be given: `outbox`, `relay`, `cancel`.
    """

    bindings = StorageContract.bindings | {"outbox", "relay", "cancel"}

    @abstractmethod
    def outbox(self, topic: str) -> Outbox:
        """Return the middleware, over the storage of `transaction`."""

    @abstractmethod
    def relay(self) -> Source:
        """Return the source of a relay."""

    @abstractmethod
    def cancel(self, id: str) -> bool:
        """Cancel a delayed event in a transaction of its own."""

    def chain(self) -> list[Middleware]:
        return [self.transaction(), self.outbox("orders")]

    def test_events_come_in_the_order_in_which_they_are_due(self) -> None:
        now = datetime.now(UTC)
        self._emit(
            _event("last", 3 * _SOON),
            _event("first", now - _FAR),
            _event("third", 2 * _SOON),
            _event("second", _SOON),
            _event("never", _FAR),
            _event("no sooner", now + _FAR),
        )
        assert ids(self._take(4)) == ["first", "second", "third", "last"]

    def test_events_of_one_time_come_in_the_order_in_which_they_were_stored(self) -> None:
        moment = datetime.now(UTC) + _SOON
        names = [f"{chr(ord('z') - number)}-{number}" for number in range(20)]
        self._emit(*(_event(name, moment) for name in names))
        assert ids(self._take(20)) == names

    def test_an_event_is_not_published_before_its_time(self) -> None:
        moment = datetime.now(UTC) + 3 * _SOON
        self._emit(_event("later", moment))
        self._take(1)
        assert datetime.now(UTC) >= moment

    def test_what_is_not_delayed_does_not_wait_for_what_is(self) -> None:
        self._emit(_event("later", _FAR), _event("now", None), _event("at once", -_FAR))
        assert sorted(ids(self._take(2))) == ["at once", "now"]

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_bytes_and_attributes_come_out_as_they_went_in(self, payload: bytes) -> None:
        event = Message(payload, {**ATTRIBUTES, "id": "ünï-1", "time": "2026-01-31T12:00:00Z"})
        event.notbefore = timedelta(milliseconds=1)
        expected = content(event)
        self._emit(event, _event("other", timedelta(milliseconds=2), topic="audit"))
        got, other = self._take(2)
        assert content(got) == expected
        assert (got.topic, got.key, got.deliveries) == ("orders", "customer-7", 1)
        assert other.topic == "audit"

    def test_a_failed_handler_leaves_nothing_that_waits(self) -> None:
        router = self.router(run=lambda item: [_event(item.id, timedelta(milliseconds=1))])
        deliver(router, *make_messages(1, "bad"), *make_messages(1))
        assert ids(self._take(1)) == ["m-0"]
        assert self.cancel("bad-0") is False

    def test_a_cancelled_event_is_not_published(self) -> None:
        self._emit(_event("gone", _SOON), _event("kept", 2 * _SOON), _event("far", _FAR))
        assert self.cancel("gone") is True
        assert self.cancel("gone") is False
        assert ids(self._take(1)) == ["kept"]
        assert self.cancel("far") is True

    def test_it_is_too_late_to_cancel_what_is_published_or_unknown(self) -> None:
        self._emit(_event("e-1", timedelta(milliseconds=1)))
        assert ids(self._take(1)) == ["e-1"]
        assert self.cancel("e-1") is False
        assert self.cancel("unknown") is False

    def test_a_cancel_takes_back_every_event_of_its_id(self) -> None:
        self._emit(_event("twin", _FAR), _event("twin", _FAR), _event("other", _SOON))
        assert self.cancel("twin") is True
        assert self.cancel("twin") is False
        assert ids(self._take(1)) == ["other"]

    def test_a_moment_may_be_the_first_or_the_last_of_the_calendar_in_any_zone(self) -> None:
        east, west = (timezone(timedelta(hours=hours)) for hours in (14, -12))
        self._emit(
            _event("last", datetime.max.replace(tzinfo=west)),
            _event("first", datetime.min.replace(tzinfo=east)),
        )
        assert ids(self._take(1)) == ["first"]
        assert self.cancel("last") is True

    def test_two_relays_publish_each_event_once_between_them(self) -> None:
        expected = [f"e-{number}" for number in range(60)]
        self._emit(
            *(_event(name, timedelta(milliseconds=5 * n)) for n, name in enumerate(expected))
        )
        published: list[str] = []
        enough = threading.Event()
        threads = [
            threading.Thread(target=self._publish, args=(self._relay(), published, enough))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _LIMIT_SECONDS
        while len(published) < len(expected) and time.monotonic() < end:
            time.sleep(0.01)
        enough.set()
        for thread in threads:
            thread.join()
        assert sorted(published) == sorted(expected)

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

    def _publish(self, relay: Source, published: list[str], enough: threading.Event) -> None:
        while not enough.is_set():
            for event in relay.read(3, 0.05):
                published.append(event.id)
                event.ack()

    def _emit(self, *events: Message[Any]) -> None:
        given = list(events)
        assert deliver(self.router(run=lambda item: given), *make_messages(1, "in")).acked

    def _take(self, count: int) -> list[Message[Any]]:
        """Publish exactly `count` events, and find no others."""
        relay = self._relay()
        taken: list[Message[Any]] = []
        end = time.monotonic() + _LIMIT_SECONDS
        while len(taken) < count and time.monotonic() < end:
            for event in relay.read(count - len(taken), 0.1):
                taken.append(event)
                event.ack()
        assert len(taken) == count, f"read {ids(taken)}, expected {count} events"
        assert ids(relay.read(10, 0.05)) == []
        relay.close()
        return taken


def _event(
    name: str, notbefore: datetime | timedelta | None, topic: str | None = None
) -> Message[Any]:
    return Message(b"{}", {"type": "event", "id": name}, topic=topic, notbefore=notbefore)
