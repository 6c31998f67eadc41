"""CloudEvents over HTTP, against a server that fails, delays and hangs up."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from cloudevents.v1.http import from_http
from tests.unit.sinks.http_receiver import (
    CONTINUE_FAST,
    CONTINUE_SLOWLY,
    DRIP,
    GRACEFUL_CLOSE,
    HANG,
    HANG_UP,
    MANY_HEADERS,
    Receiver,
)
from tests.waiting import eventually

from conquiet.errors import GivenBack, InvalidMessage, SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks import HttpSink, Refused, Rejected
from conquiet.testing.contracts import SinkContract
from conquiet.testing.contracts.samples import ids, make_messages


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def sink(receiver: Receiver) -> Iterator[HttpSink]:
    sink = HttpSink(receiver.url, timeout=5)
    yield sink
    sink.close()


class TestHttpSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _receive(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def open(self) -> HttpSink:
        return HttpSink(self.receiver.url, timeout=5)

    def list_published(self) -> Sequence[Message[Any]]:
        return self.receiver.arrived

    def outage(self) -> AbstractContextManager[object]:
        return self.receiver.outage()


@pytest.mark.parametrize("status", [400, 409, 413, 415, 422])
def test_a_message_that_is_rejected_fails_alone_for_good(
    receiver: Receiver, sink: HttpSink, status: int
) -> None:
    receiver.answers["m-1"] = [status]
    answers = sink.publish_each(make_messages(3))
    assert [type(answer) for answer in answers] == [type(None), Rejected, type(None)]
    assert f"{status}" in str(answers[1])
    assert "said" in str(answers[1])
    assert ids(receiver.arrived) == ["m-0", "m-2"]


@pytest.mark.parametrize("status", [500, 501, 505, 599])
def test_a_receiver_that_fails_at_a_message_costs_it_an_attempt(
    receiver: Receiver, sink: HttpSink, status: int
) -> None:
    receiver.answers["m-1"] = [status]
    answers = sink.publish_each(make_messages(3))
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_busy_receiver_is_left_alone_and_blames_nobody(
    receiver: Receiver, sink: HttpSink, status: int
) -> None:
    receiver.answers["m-1"] = [status, 204]
    answers = sink.publish_each(make_messages(4))
    assert [type(answer) is type(None) for answer in answers] == [True, False, False, False]
    assert all(isinstance(answer, SinkUnavailable) for answer in answers[1:])
    assert [asked for asked, _, _ in receiver.requests] == ["m-0", "m-1"]
    assert list(sink.publish_each(make_messages(4)[1:])) == [None] * 3


def test_a_receiver_that_says_for_how_long_is_not_asked_before(
    receiver: Receiver, sink: HttpSink
) -> None:
    receiver.answers["*"] = [503, 204]
    receiver.headers["retry-after"] = "1"
    began = time.monotonic()
    with pytest.raises(SinkUnavailable):
        sink.publish(make_messages(1))
    while True:
        try:
            assert list(sink.publish_each(make_messages(1))) == [None]
            break
        except SinkUnavailable:
            assert len(receiver.requests) == 1
            time.sleep(0.02)
    assert time.monotonic() - began >= 1


def test_a_receiver_that_wants_to_be_left_alone_for_a_day_is_asked_sooner(
    receiver: Receiver, sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.relay.sinks.http._MAX_PAUSE_SECONDS", 0.2)
    receiver.answers["*"] = [503, 204]
    receiver.headers["retry-after"] = "86400"

    def goes_out() -> bool:
        with suppress(SinkUnavailable):
            return list(sink.publish_each(make_messages(1))) == [None]
        return False

    assert not goes_out()
    assert eventually(goes_out)


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 405, 410])
def test_a_wrong_address_blames_no_message(receiver: Receiver, sink: HttpSink, status: int) -> None:
    receiver.answers["*"] = [status]
    with pytest.raises(SinkUnavailable, match=f"{status}.*correct the URL"):
        sink.publish(make_messages(2))
    assert len(receiver.requests) == 1


def test_a_message_that_the_receiver_hangs_up_on_fails_alone(
    receiver: Receiver, sink: HttpSink
) -> None:
    receiver.answers["m-1"] = [HANG_UP]
    answers = sink.publish_each(make_messages(3))
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    assert ids(receiver.arrived) == ["m-0", "m-2"]


def test_a_connection_that_the_receiver_closed_while_idle_costs_nothing(
    receiver: Receiver, sink: HttpSink
) -> None:
    receiver.answers["*"] = [GRACEFUL_CLOSE]
    assert list(sink.publish_each(make_messages(3))) == [None] * 3
    assert list(sink.publish_each(make_messages(3))) == [None] * 3


def test_a_message_that_hangs_fails_alone_if_later_ones_go_through(receiver: Receiver) -> None:
    sink = HttpSink(receiver.url, timeout=0.2)
    receiver.answers["m-1"] = [HANG]
    answers = sink.publish_each(make_messages(3))
    assert [type(answer) for answer in answers] == [type(None), Refused, type(None)]
    sink.close()


def test_a_receiver_that_hangs_is_an_outage_and_not_waited_for_by_every_message(
    receiver: Receiver,
) -> None:
    sink = HttpSink(receiver.url, timeout=0.1)
    receiver.answers["*"] = [HANG]
    with pytest.raises(SinkUnavailable, match="in time"):
        sink.publish(make_messages(50))
    assert len(receiver.requests) <= 2
    sink.close()


@pytest.mark.parametrize("answer", [DRIP, CONTINUE_SLOWLY, CONTINUE_FAST, MANY_HEADERS])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_answer_without_end_costs_its_message_an_attempt_and_the_relay_the_timeout(
    request: pytest.FixtureRequest, certificate: Path, scheme: str, answer: int
) -> None:
    """The timeout of a socket alone would never end: each read brings a byte in time."""
    receiver = request.getfixturevalue("secure" if scheme == "https" else "receiver")
    context = ssl.create_default_context(cafile=certificate) if scheme == "https" else None
    sink = HttpSink(receiver.url, timeout=0.3, context=context)
    receiver.answers["m-0"] = [answer]
    began = time.monotonic()
    [refused] = sink.publish_each(make_messages(1))
    assert isinstance(refused, Refused)
    assert time.monotonic() - began < 5  # the receiver would go on until the end of the test
    assert sink.publish_each(make_messages(2)[1:]) == [None]
    sink.close()


def test_addresses_that_do_not_answer_share_the_timeout(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have any number of addresses, as many as the owner of its domain likes."""
    resolve = socket.getaddrinfo
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):  # a full queue: the next connection waits until it is given up
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())

        def resolve_to_many(host: Any, port: Any, **options: Any) -> Any:
            silent = resolve(host, full.getsockname()[1], **options)
            return [*silent * 9, *resolve(host, port, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve_to_many)
        sink = HttpSink(receiver.url, timeout=1)
        began = time.monotonic()
        assert sink.publish_each(make_messages(1)) == [None]
        assert time.monotonic() - began < 5  # each of them for a second would be 9
        sink.close()


def test_what_a_slow_receiver_leaves_no_time_for_is_given_back(receiver: Receiver) -> None:
    """So that what went out is marked, and not sent again for ever by a batch that never ends."""
    sink = HttpSink(receiver.url, timeout=1)
    receiver.delay = 0.2
    answers = sink.publish_each(make_messages(20))
    sink.close()
    went = [answer for answer in answers if answer is None]
    assert 1 <= len(went) < 20
    assert len(receiver.arrived) == len(went)
    assert {type(answer) for answer in answers[len(went) :]} == {GivenBack}


@pytest.mark.parametrize(
    ("user", "header"), [("me:p%40ss", "Basic bWU6cEBzcw=="), ("t0ken", "Bearer t0ken")]
)
def test_credentials_of_the_url_go_into_a_header(
    receiver: Receiver, user: str, header: str
) -> None:
    sink = HttpSink.from_url(receiver.url.replace("://", f"://{user}@"))
    assert sink.publish_each(make_messages(1)) == [None]
    sink.close()
    [(_, _, headers)] = receiver.requests
    assert headers["authorization"] == header
    assert "@" not in headers["Host"]


def test_headers_are_what_the_cloudevents_library_reads(receiver: Receiver, sink: HttpSink) -> None:
    sent = Message({"a": 1}, {"id": "ä 1%", "type": "sold", "source": "/s", "subject": '"x"'})
    assert list(sink.publish_each([sent])) == [None]
    _, _, headers = receiver.requests[0]
    event = from_http(headers, receiver.arrived[0].data)
    # That library leaves percent-encoding to its users.
    assert headers["ce-id"] == "%C3%A4%201%25"
    assert headers["ce-subject"] == "%22x%22"
    assert event["type"] == "sold"
    assert event.data == {"a": 1}


def test_what_consumers_filter_by_goes_along_with_hyphens(
    receiver: Receiver, sink: HttpSink
) -> None:
    named = {"aggregate_type": "store", "aggregate_id": "7"}
    sink.publish([Message(b"", {"id": "1", "type": "sold", "source": "/s", **named})])
    _, path, headers = receiver.requests[0]
    assert path == "/events"
    found = {name: headers[name] for name in headers if name.startswith(("event", "aggr"))}
    assert found == {
        "event-id": "1",
        "event-type": "sold",
        "aggregate-type": "store",
        "aggregate-id": "7",
    }


def test_own_headers_go_along(receiver: Receiver) -> None:
    sink = HttpSink(receiver.url, headers={"authorization": "Bearer x"})
    assert list(sink.publish_each(make_messages(1))) == [None]
    assert receiver.requests[0][2]["authorization"] == "Bearer x"
    sink.close()


def test_a_content_type_cannot_smuggle_in_a_header(receiver: Receiver, sink: HttpSink) -> None:
    attributes = {"id": "1", "type": "t", "source": "/s", "datacontenttype": "a/b\r\nx-evil: 1"}
    assert list(sink.publish_each([Message(b"", attributes)])) == [None]
    assert "x-evil" not in receiver.requests[0][2]


def test_a_check_tells_whether_somebody_listens(receiver: Receiver, sink: HttpSink) -> None:
    sink.check()
    with receiver.outage(), pytest.raises(SinkUnavailable):
        sink.check()


def test_a_name_that_does_not_resolve_is_an_outage() -> None:
    with pytest.raises(SinkUnavailable):
        HttpSink("http://nowhere.invalid/").publish(make_messages(1))


def test_a_receiver_that_takes_no_connection_in_time_is_an_outage() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as waiting:
        port = server.getsockname()[1]
        with suppress(TimeoutError):  # until the queue of the kernel is full
            while True:
                waiting.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        sink = HttpSink(f"http://127.0.0.1:{port}/", timeout=0.2)
        with pytest.raises(SinkUnavailable, match="cannot be reached"):
            sink.publish(make_messages(3))


def test_a_message_without_an_id_is_invalid(sink: HttpSink) -> None:
    [answer] = sink.publish_each([Message(b"", {"type": "t", "source": "/s"})])
    assert isinstance(answer, InvalidMessage)


@pytest.fixture
def secure(certificate: Path) -> Iterator[Receiver]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Receiver(context) as receiver:
        yield receiver


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(secure: Receiver) -> None:
    with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        HttpSink(secure.url).publish(make_messages(1))
    assert secure.requests == []


def test_a_private_certificate_authority_is_trusted_if_given(
    secure: Receiver, certificate: Path
) -> None:
    sink = HttpSink(secure.url, context=ssl.create_default_context(cafile=certificate))
    assert list(sink.publish_each(make_messages(2))) == [None, None]
    sink.close()
