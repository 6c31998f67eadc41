"""The contract of a source, and the binding that it shares with the contract of a worker."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from conquiet.acking import settle
from conquiet.errors import GivenBack, SinkUnavailable, StoreError
from conquiet.message import Message
from conquiet.source import Leased, Replayable, Source
from conquiet.testing.contracts.contract import Contract
from conquiet.testing.contracts.samples import ATTRIBUTES, PAYLOADS, content, ids, make_messages

LONG = 60.0
"""A lease that does not end during a test."""
_TOTAL = 6


class ConsumerContract(Contract):
    """Binds a source; the base of the contracts of source and worker.

    Must be given: `open`, `publish`. As needed: `lease`, `redelivery_within`,
    `returns_at_once`, `keeps_place`, `keeps_count`, `crash`.
    """

    bindings = frozenset(
        """open publish crash lease redelivery_within returns_at_once keeps_place
        keeps_count""".split()  # noqa: SIM905 - it reads better
    )

    lease: float | None = 0.5
    """Seconds of the short leases that tests wait for; None if your source has no leases."""

    redelivery_within: float = 5.0
    """Seconds after a nack, a close, a crash or the end of a lease until a message is delivered."""

    returns_at_once: bool = True
    """False if a nacked message, or one in flight at close, returns only when its lease ends."""

    keeps_place: bool = True
    """False if a message that returns may come after later ones of its key; such a source
    cannot serve an ordered worker."""

    keeps_count: bool = True
    """False if a close changes the count of deliveries: a broker counts what was given back to it,
    or counts nothing."""

    @abstractmethod
    def open(self, lease: float) -> Source:
        """Open a consumer of the group; the group starts at the beginning."""

    @abstractmethod
    def publish(self, messages: Sequence[Message[Any]]) -> None:
        """Put messages where the source finds them, in this order."""

    def crash(self, source: Source) -> None:
        """End the source as `kill -9` would.

        Doing nothing is enough for a source without a connection or thread that keeps messages.
        """

    # --- for the tests ----------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _close_sources(self) -> Iterator[None]:
        self._opened: list[Source] = []
        yield
        for source in self._opened:
            with suppress(Exception):  # it may be crashed, or its server gone
                source.close()

    def consumer(self, lease: float = LONG) -> Source:
        source = self.open(lease)
        self._opened.append(source)
        return source

    @property
    def short(self) -> float:
        """A lease for tests in which it ends."""
        return LONG if self.lease is None else self.lease

    @property
    def returning(self) -> float:
        """A lease for tests in which messages are given back."""
        return LONG if self.returns_at_once else self.short

    @property
    def quiet(self) -> float:
        """Seconds without a message after which none is expected."""
        return 0.2 if self.lease is None else 1.5 * self.lease

    def send(self, count: int, prefix: str = "m", **attributes: str) -> list[str]:
        messages = make_messages(count, prefix, **attributes)
        self.publish(messages)
        return ids(messages)

    def take(self, source: Source, count: int, limit: int = 100) -> list[Message[Any]]:
        """Read exactly `count` messages, or fail."""
        taken: list[Message[Any]] = []
        end = time.monotonic() + self.redelivery_within + self.quiet
        while len(taken) < count and time.monotonic() < end:
            taken.extend(source.read(min(limit, count - len(taken)), 0.1))
        assert len(taken) == count, f"read {ids(taken)}, expected {count} messages"
        return taken

    def expect_nothing(self, source: Source, seconds: float | None = None) -> None:
        """Check that no message comes, also after the end of a short lease."""
        end = time.monotonic() + (self.quiet if seconds is None else seconds)
        while (left := end - time.monotonic()) > 0:
            assert ids(source.read(100, left)) == []

    def expect_rest(self, expected: list[str]) -> None:
        """Check that a new consumer gets these messages and no others; ack them."""
        source = self.consumer(LONG)
        rest = self.take(source, len(expected))
        assert sorted(ids(rest)) == sorted(expected)
        for message in rest:
            message.ack()
        self.expect_nothing(source)


class ReplayContract(ConsumerContract):
    """Replays a source without moving its position. As needed: `position`."""

    bindings = ConsumerContract.bindings | {"position"}

    def position(self, message: Message[Any]) -> str:
        """Return the start or end of `replay` for this message."""
        position: str = message.locals["position"]
        return position

    def test_a_replay_does_not_move_the_live_position(self) -> None:
        source = self._replayable()
        sent = self.send(5)
        for message in self.take(source, 2, limit=2):
            message.ack()
        assert ids(list(source.replay())) == sent
        assert ids(self.take(source, 3)) == sent[2:]

    def test_a_replay_goes_from_start_to_end_both_included(self) -> None:
        source = self._replayable()
        sent = self.send(5)
        places = [self.position(message) for message in source.replay()]
        assert ids(list(source.replay(places[1], places[3]))) == sent[1:4]
        assert ids(list(source.replay(places[3]))) == sent[3:]
        assert ids(list(source.replay(None, places[1]))) == sent[:2]

    def test_a_replay_gives_what_was_acked_byte_for_byte(self) -> None:
        source = self._replayable()
        sent = Message(PAYLOADS["binary"], {**ATTRIBUTES, "id": "m"}, topic="orders")
        self.publish([sent])
        self.take(source, 1)[0].ack()
        assert [content(message) for message in source.replay()] == [content(sent)]

    def _replayable(self) -> Any:
        source = self.consumer()
        if not isinstance(source, Replayable):
            pytest.skip("this source cannot be replayed")
        return source


class SourceContract(ReplayContract):
    """A source delivers in order, delivers unacked messages again, and nothing else.

    Binding: see `ConsumerContract` and, for a source that is `Replayable`, `ReplayContract`. For
    one with groups, `open_other_group` opens a consumer of another group.
    """

    bindings = ReplayContract.bindings | {"open_other_group"}

    def open_other_group(self) -> Source:
        """Return a consumer of another group, which starts at the beginning."""
        pytest.skip("this source has no groups")

    # --- reading ----------------------------------------------------------------------------

    def test_what_was_published_is_read_in_its_order(self) -> None:
        sent = self.send(10)
        assert ids(self.take(self.consumer(), 10, limit=3)) == sent

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_bytes_attributes_and_topic_arrive_as_they_were_sent(self, payload: bytes) -> None:
        sent = Message(payload, {**ATTRIBUTES, "id": "ünï-1"}, topic="orders")
        self.publish([sent])
        [got] = self.take(self.consumer(), 1)
        assert content(got) == content(sent)
        assert (got.topic, got.key, got.deliveries) == ("orders", "customer-7", 1)

    def test_a_read_gives_no_more_than_its_limit(self) -> None:
        self.send(5)
        source = self.consumer()
        self.take(source, 1, limit=1)
        assert 1 <= len(source.read(2, 1.0)) <= 2

    def test_a_read_ends_after_its_timeout_when_nothing_comes(self) -> None:
        source = self.consumer()
        began = time.monotonic()
        assert list(source.read(10, 0.2)) == []
        assert time.monotonic() - began < 5

    def test_a_waiting_read_wakes_when_something_is_published(self) -> None:
        source = self.consumer()
        got: list[Message[Any]] = []

        def wait() -> None:
            while not got:
                got.extend(source.read(10, 60.0))  # for the first, not for ten

        reader = threading.Thread(target=wait, daemon=True)
        reader.start()
        sent = self.send(1)
        reader.join(30)
        assert ids(got) == sent

    # --- settling ---------------------------------------------------------------------------

    @pytest.mark.parametrize("acked", [0, 2, _TOTAL])
    def test_acking_k_of_n_and_closing_returns_the_other_n_minus_k(self, acked: int) -> None:
        sent = self.send(_TOTAL)
        source = self.consumer(self.returning)
        self._ack_some(source, acked)
        source.close()
        self.expect_rest(sent[acked:])

    @pytest.mark.parametrize("acked", [0, 2, _TOTAL])
    def test_acking_k_of_n_and_crashing_returns_the_other_n_minus_k(self, acked: int) -> None:
        sent = self.send(_TOTAL)
        source = self.consumer(self.short)
        self._ack_some(source, acked)
        self.crash(source)
        self.expect_rest(sent[acked:])

    @pytest.mark.parametrize("acked", [0, 2, _TOTAL])
    def test_acking_k_of_n_and_letting_the_lease_end_returns_the_other_n_minus_k(
        self, acked: int
    ) -> None:
        if self.lease is None:
            pytest.skip("this source knows no leases")
        sent = self.send(_TOTAL)
        self._ack_some(self.consumer(self.short), acked)
        self.expect_rest(sent[acked:])

    def test_what_came_back_is_the_same_message_and_can_be_acked(self) -> None:
        sent = Message(PAYLOADS["binary"], {**ATTRIBUTES, "id": "m"}, topic="orders")
        self.publish([sent])
        source = self.consumer(self.returning)
        self.take(source, 1)[0].nack(ValueError("failed"))
        [again] = self.take(source, 1)
        assert content(again) == content(sent)
        again.ack()
        source.close()
        self.expect_rest([])

    def test_each_failed_delivery_is_counted(self) -> None:
        self.send(1)
        source = self.consumer(self.returning)
        counts = []
        for _ in range(3):
            [message] = self.take(source, 1)
            counts.append(message.deliveries)
            message.nack(ValueError("failed"))
        assert counts == [1, 2, 3]

    def test_a_nack_without_a_reason_is_a_nack(self) -> None:
        self.send(1)
        source = self.consumer(self.returning)
        self.take(source, 1)[0].nack(None)
        assert self.take(source, 1)[0].deliveries == 2

    @pytest.mark.parametrize("error", [StoreError, GivenBack, SinkUnavailable])
    def test_a_blameless_nack_costs_no_attempt(self, error: type[Exception]) -> None:
        self.send(1)
        source = self.consumer(self.returning)
        for _ in range(3):
            [message] = self.take(source, 1)
            assert message.deliveries == 1
            message.nack(error("not its fault"))

    def test_a_blameless_nack_forgets_no_earlier_failure(self) -> None:
        self.send(1)
        source = self.consumer(self.returning)
        for error, deliveries in ((ValueError("failed"), 1), (GivenBack("not now"), 2), (None, 2)):
            [message] = self.take(source, 1)
            assert message.deliveries == deliveries
            message.nack(error)

    def test_one_message_nacked_leaves_its_neighbours_acked(self) -> None:
        self.send(5)
        source = self.consumer(self.returning)
        for message in self.take(source, 5):
            if message.id == "m-2":
                message.nack(ValueError("failed"))
            else:
                message.ack()
        assert ids(self.take(source, 1)) == ["m-2"]
        source.close()
        self.expect_rest(["m-2"])

    def test_settling_works_from_another_thread(self) -> None:
        sent = self.send(4)
        source = self.consumer(self.returning)
        messages = self.take(source, 4)
        threads = [threading.Thread(target=message.ack) for message in messages[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        source.close()
        self.expect_rest(sent[3:])

    # --- order ------------------------------------------------------------------------------

    def test_what_was_given_back_returns_in_the_original_order(self) -> None:
        if not self.keeps_place:
            pytest.skip("this source does not keep the place of a message")
        sent = self.send(5, partitionkey="k")
        source = self.consumer(self.returning)
        for message in reversed(self.take(source, 5)):
            message.nack(GivenBack("an earlier one failed"))
        if not self.returns_at_once:
            time.sleep(self.short)
        assert ids(self.take(source, 5)) == sent

    def test_a_failed_message_returns_before_later_ones_of_its_key(self) -> None:
        if not self.keeps_place:
            pytest.skip("this source does not keep the place of a message")
        sent = self.send(3, "early", partitionkey="k")
        source = self.consumer(self.returning)
        first = self.take(source, 1, limit=1)
        sent += self.send(2, "late", partitionkey="k")
        first[0].nack(ValueError("failed"))
        assert ids(self.take(source, 5)) == sent

    # --- several consumers ------------------------------------------------------------------

    def test_competing_consumers_split_the_messages_and_miss_none(self) -> None:
        sent = self.send(60)
        got: list[list[str]] = [[], [], []]
        end = time.monotonic() + 30

        def consume(source: Source, mine: list[str]) -> None:
            while sum(map(len, got)) < len(sent) and time.monotonic() < end:
                for message in source.read(3, 0.1):
                    mine.append(message.id)
                    message.ack()

        threads = [threading.Thread(target=consume, args=(self.consumer(), mine)) for mine in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for mine in got for name in mine) == sorted(sent)

    def test_a_message_in_flight_is_not_delivered_again(self) -> None:
        self.send(3)
        first, second = self.consumer(), self.consumer()
        self.take(first, 3)
        self.expect_nothing(first, 0.2)
        self.expect_nothing(second, 0.2)

    def test_groups_read_independently_of_each_other(self) -> None:
        sent = self.send(4)
        other = self.open_other_group()
        self._opened.append(other)
        for message in self.take(self.consumer(), 4):
            message.ack()
        assert ids(self.take(other, 4)) == sent

    # --- leases -----------------------------------------------------------------------------

    def test_a_renewed_lease_does_not_end(self) -> None:
        first, second = self._open_leased(), self.consumer(self.short)
        sent = self.send(1)
        held = self.take(first, 1)
        end = time.monotonic() + 3 * self.short
        while time.monotonic() < end:
            first.renew(held)
            assert ids(second.read(1, self.short / 4)) == []
        assert ids(self.take(second, 1)) == sent  # renewed no more

    def test_a_lost_lease_counts_as_a_delivery(self) -> None:
        first, second = self._open_leased(), self.consumer()
        self.send(1)
        self.take(first, 1)
        assert self.take(second, 1)[0].deliveries == 2

    def test_a_late_nack_does_not_take_the_message_from_its_new_holder(self) -> None:
        first, second = self._open_leased(), self.consumer()
        self.send(1)
        [lost] = self.take(first, 1)
        [held] = self.take(second, 1)
        lost.nack(ValueError("too late"))
        self.expect_nothing(self.consumer(), 0.2)
        held.ack()
        second.close()
        self.expect_rest([])

    def test_renewing_what_is_lost_or_settled_is_harmless(self) -> None:
        first, second = self._open_leased(), self.consumer()
        self.send(2)
        lost, acked = self.take(first, 2)
        acked.ack()
        [held] = self.take(second, 1)
        first.renew([lost, acked])
        held.nack(GivenBack("for the next"))
        second.close()
        self.expect_rest([lost.id])

    # --- everything at once -----------------------------------------------------------------

    def test_any_sequence_of_settlements_loses_nothing_and_repeats_nothing(self) -> None:
        if not self.returns_at_once:
            pytest.skip("what this source takes back returns only when the lease ends")
        pytest.importorskip("hypothesis")
        check_source(self)

    # --- inside -----------------------------------------------------------------------------

    def _ack_some(self, source: Source, count: int) -> None:
        taken = self.take(source, _TOTAL)[:count]
        settle([message.acking for message in taken if message.acking is not None])

    def _open_leased(self) -> Any:
        source = self.consumer(self.short)
        if self.lease is None or not isinstance(source, Leased):
            pytest.skip("this source knows no leases")
        return source


def check_source(contract: ConsumerContract) -> None:
    """Check that no mix of publish, read, ack, nack and close loses or repeats a message.

    Each run leaves the source empty.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        precondition,
        rule,
        run_state_machine_as_test,
    )

    runs = iter(range(1_000_000))

    class Model(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.run = next(runs)
            self.sent = 0
            self.unsettled: list[str] = []  # in the order of publication
            self.held: dict[str, Message[Any]] = {}
            self.tried: dict[str, int | None] = {}  # None: after a close it may count or not
            self.source: Source = contract.consumer(LONG)

        @rule(count=st.integers(1, 4))
        def publish(self, count: int) -> None:
            sent = contract.send(count, f"run{self.run}-{self.sent}")
            self.sent += 1
            self.unsettled.extend(sent)
            self.tried.update(dict.fromkeys(sent, 0))

        @rule(limit=st.integers(1, 5))
        def read(self, limit: int) -> None:
            ready = [name for name in self.unsettled if name not in self.held]
            messages = contract.take(self.source, min(limit, len(ready)), limit)
            assert sorted(ids(messages)) == sorted(set(ids(messages)) & set(ready))
            if contract.keeps_place:
                assert ids(messages) == ready[: len(messages)]
            for message in messages:
                tried = self.tried[message.id]
                assert tried is None or message.deliveries == tried + 1
                self.tried[message.id] = message.deliveries
                self.held[message.id] = message

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def ack(self, data: st.DataObject) -> None:
            message = self._any_held(data)
            message.ack()
            self.unsettled.remove(message.id)

        @precondition(lambda self: self.held)
        @rule(data=st.data(), blameless=st.booleans())
        def nack(self, data: st.DataObject, blameless: bool) -> None:
            message = self._any_held(data)
            message.nack(GivenBack("not now") if blameless else ValueError("failed"))
            if blameless:
                self.tried[message.id] = message.deliveries - 1

        @rule()
        def close_and_open_again(self) -> None:
            self.source.close()
            lost = self.held if contract.keeps_count else self.unsettled
            self.tried.update(dict.fromkeys(lost))
            self.held.clear()
            self.source = contract.consumer(LONG)

        def teardown(self) -> None:
            self.close_and_open_again()
            rest = contract.take(self.source, len(self.unsettled))
            assert sorted(ids(rest)) == sorted(self.unsettled)
            for message in rest:
                message.ack()
            assert ids(self.source.read(100, 0.01)) == []
            self.source.close()

        def _any_held(self, data: st.DataObject) -> Message[Any]:
            name = data.draw(st.sampled_from(list(self.held)))
            return self.held.pop(name)

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
