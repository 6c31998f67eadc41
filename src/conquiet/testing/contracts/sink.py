"""The contract of a sink."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest

from conquiet.acking import Acking
from conquiet.errors import SinkUnavailable
from conquiet.message import Message
from conquiet.sink import Sink
from conquiet.testing import eventually
from conquiet.testing.contracts.contract import Contract
from conquiet.testing.contracts.samples import ATTRIBUTES, PAYLOADS, content, ids, make_messages


class SinkContract(Contract):
    """A sink publishes in order, answers for each message, and blames only those that failed.

    Must be given: `open`, `list_published`. As needed: `keeps_topic`, `make_refused`, `outage`.
    """

    bindings = frozenset(("open", "list_published", "keeps_topic", "make_refused", "outage"))

    keeps_topic: bool = True
    """False if `list_published` does not know the topic of a message."""

    @abstractmethod
    def open(self) -> Sink:
        """Return a sink; what it publishes is what `list_published` returns."""

    @abstractmethod
    def list_published(self) -> Sequence[Message[Any]]:
        """Return all that has arrived so far, in order."""

    def make_refused(self) -> Message[Any]:
        """Return a message that this sink can never publish; by default, one without encoding."""
        return Message(object(), {**ATTRIBUTES, "datacontenttype": "text/plain", "id": "bad"})

    def outage(self) -> AbstractContextManager[object]:
        """Return a context that keeps the sink out of reach."""
        pytest.skip("this binding cannot cut its sink off")

    @pytest.fixture(autouse=True)
    def _close_sinks(self) -> Iterator[None]:
        self._opened: list[Sink] = []
        yield
        for sink in self._opened:
            with suppress(Exception):  # its server may be gone
                sink.close()

    def sink(self) -> Sink:
        sink = self.open()
        self._opened.append(sink)
        return sink

    def wait_for(self, count: int) -> Sequence[Message[Any]]:
        eventually(lambda: len(self.list_published()) >= count, message=f"{count} messages arrive")
        return self.list_published()

    def test_messages_arrive_in_the_order_of_publication(self) -> None:
        sink = self.sink()
        first, second = make_messages(20, "first"), make_messages(20, "second")
        assert list(sink.publish_each(first)) == [None] * 20
        assert list(sink.publish_each(second)) == [None] * 20
        assert ids(self.wait_for(40)) == ids(first + second)

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_bytes_attributes_and_topic_arrive_as_they_were_sent(self, payload: bytes) -> None:
        sent = Message(payload, {**ATTRIBUTES, "id": "ünï-1"}, topic="orders")
        assert list(self.sink().publish_each([sent])) == [None]
        [got] = self.wait_for(1)
        assert content(got) == content(sent)
        assert not self.keeps_topic or got.topic == "orders"

    def test_typed_data_arrives_as_json(self) -> None:
        sent = Message({"order": 7}, {"id": "1", "type": "placed", "source": "/shop"})
        assert list(self.sink().publish_each([sent])) == [None]
        assert self.wait_for(1)[0].data == b'{"order":7}'

    def test_publishing_nothing_answers_nothing(self) -> None:
        assert list(self.sink().publish_each([])) == []

    def test_a_message_that_fails_fails_alone(self) -> None:
        first, last = make_messages(2)
        answers = self.sink().publish_each([first, self.make_refused(), last])
        assert [answer is None for answer in answers] == [True, False, True]
        assert not isinstance(answers[1], SinkUnavailable)
        assert ids(self.wait_for(2)) == ids([first, last])

    def test_publish_raises_if_a_message_was_not_published(self) -> None:
        sink = self.sink()
        first, last = make_messages(2)
        with pytest.raises(Exception, match=r".") as raised:
            sink.publish([first, self.make_refused(), last])
        assert not isinstance(raised.value, SinkUnavailable)
        assert raised.value.__notes__ == ["1 of 3 messages were not published"]

    def test_publishing_settles_no_message(self) -> None:
        settled: list[str] = []
        [message] = make_messages(1)
        message.acking = Acking.calling(
            lambda: settled.append("ack"), lambda error: settled.append("nack")
        )
        self.sink().publish([message])
        assert settled == []

    def test_a_sink_out_of_reach_raises_and_blames_no_message(self) -> None:
        sink = self.sink()
        with self.outage(), pytest.raises(SinkUnavailable):
            sink.publish(make_messages(3))

    def test_a_sink_works_again_after_an_outage(self) -> None:
        sink = self.sink()
        with self.outage(), pytest.raises(SinkUnavailable):
            sink.publish(make_messages(1, "lost"))
        messages = make_messages(2)

        def is_published() -> bool:
            try:
                return list(sink.publish_each(messages)) == [None, None]
            except SinkUnavailable:
                return False

        eventually(is_published, timeout=30, interval=0.05)
        assert ids(self.wait_for(2))[-2:] == ids(messages)

    def test_closing_twice_is_harmless(self) -> None:
        sink = self.sink()
        sink.publish(make_messages(1))
        sink.close()
        sink.close()
        assert len(self.wait_for(1)) == 1
