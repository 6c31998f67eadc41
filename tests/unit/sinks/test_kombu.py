"""What of Kombu needs no broker: some transports, and the verification of certificates."""

from __future__ import annotations

import socket
import ssl
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import kombu
import pytest

from conquiet.errors import ConfigError, GivenBack, SinkUnavailable
from conquiet.message import Message
from conquiet.registry import open_sink
from conquiet.relay.sinks import KombuSink
from conquiet.testing.contracts import SinkContract
from conquiet.testing.contracts.samples import make_messages


def message_of(delivery: Any) -> Message[bytes]:
    attributes = {
        name.removeprefix("cloudEvents_"): value
        for name, value in delivery.headers.items()
        if name.startswith("cloudEvents_")
    }
    attributes["datacontenttype"] = delivery.content_type
    body = delivery.body.encode() if isinstance(delivery.body, str) else bytes(delivery.body)
    return Message(body, attributes, topic=delivery.delivery_info["exchange"])


class TestKombuSinkInMemory(SinkContract):
    @pytest.fixture(autouse=True)
    def _queue(self) -> Iterator[None]:
        self.queue = f"events-{uuid.uuid4()}"
        self.got: list[Message[Any]] = []
        with kombu.Connection("memory://") as self.connection:
            yield

    def open(self) -> KombuSink:
        return KombuSink("memory://", "orders", queues=[self.queue])

    def list_published(self) -> Sequence[Message[Any]]:
        channel = self.connection.channel()
        while (delivery := channel.basic_get(self.queue, no_ack=True)) is not None:
            self.got.append(message_of(channel.message_to_python(delivery)))
        return self.got

    @pytest.fixture(autouse=True)
    def _own_exchange(self) -> Iterator[None]:
        """The memory of this transport outlives its connections."""
        yield
        kombu.Connection("memory://").transport.Channel.queues.clear()
        kombu.Connection("memory://").transport.state.clear()


def test_what_there_is_no_time_for_is_given_back() -> None:
    sink = KombuSink("memory://", "orders", queues=["late"], timeout=1e-9)
    assert {type(answer) for answer in sink.publish_each(make_messages(3))} == {GivenBack}
    sink.close()


def test_a_directory_serves_as_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data_in", "data_out", "control"):
        (tmp_path / name).mkdir()
    sink = open_sink("kombu+filesystem://?queues=events", topic="orders")
    assert list(sink.publish_each(make_messages(3))) == [None] * 3
    sink.close()
    assert len(list((tmp_path / "data_out").iterdir())) == 3


def test_a_transport_that_cannot_tell_needs_a_queue() -> None:
    with pytest.raises(ConfigError, match="queues"):
        KombuSink("memory://", "orders")


@pytest.fixture
def tls_port(certificate: Path) -> Iterator[int]:
    """Shakes hands as 127.0.0.1, and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("host", "trusted", "says"),
    [
        ("127.0.0.1", False, "self-signed certificate"),
        ("localhost", True, "Hostname mismatch"),
        ("127.0.0.1", True, "closed"),  # by the server, once hands were shaken
    ],
)
def test_the_certificate_of_a_broker_is_verified(
    tls_port: int, certificate: Path, host: str, trusted: bool, says: str
) -> None:
    tls = {"ca_certs": str(certificate)} if trusted else None
    sink = KombuSink(f"amqps://guest:guest@{host}:{tls_port}//", "orders", timeout=5, tls=tls)
    with pytest.raises(SinkUnavailable, match=says):
        sink.publish(make_messages(1))
    sink.close()
