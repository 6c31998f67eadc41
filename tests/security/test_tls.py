"""A certificate that nobody vouches for, or that is another's, is refused in one clear line."""

from __future__ import annotations

import ssl

import pytest
from tests.integration.redis import servers
from tests.security.certificates import certificate
from tests.unit.sinks.http_receiver import Receiver

from conquiet import Message, cli
from conquiet.errors import SinkUnavailable
from conquiet.operations.presence import check_relays
from conquiet.relay.inspection import Inspection
from conquiet.relay.sinks import HttpSink
from conquiet.sql import Outbox, engine, schema

EVENT = {"id": "1", "type": "sold", "source": "/shop"}


@pytest.fixture
def secure_redis(redis_server, tmp_path):
    """The URL of a Redis behind TLS, whose certificate nobody vouches for."""
    with servers.tls_in_front_of(redis_server.port, tmp_path) as (port, _):
        yield f"rediss://127.0.0.1:{port}/0"


@pytest.fixture
def shop(sqlite_url):
    made = engine(sqlite_url)
    schema.init(made)
    with made.begin() as connection:
        Outbox("orders").add(connection, [Message(b"{}", dict(EVENT))])
    yield made
    made.dispose()


@pytest.fixture
def secure_receiver(tmp_path):
    made, key = certificate(tmp_path, "DNS:elsewhere")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    with Receiver(context) as receiver:
        yield receiver, made


def test_a_relay_publishes_nothing_to_a_stranger(
    shop, sqlite_url, secure_receiver, secure_redis, redis_client, caplog
) -> None:
    receiver, _ = secure_receiver
    for sink in (receiver.url, secure_redis):
        caplog.clear()
        arguments = ["relay", "run", "--until-empty", "--database", sqlite_url, "--sink", sink]
        assert cli.main(arguments) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert receiver.requests == []
    assert redis_client.keys() == []
    assert len(Inspection(shop, "outbox").entries()) == 1  # it still waits


def test_a_webhook_of_another_name(secure_receiver) -> None:
    receiver, certificate = secure_receiver
    sink = HttpSink(receiver.url, context=ssl.create_default_context(cafile=certificate))
    with pytest.raises(SinkUnavailable, match="certificate is not valid for"):
        sink.publish([Message(b"{}", dict(EVENT))])
    sink.close()


def test_the_health_of_a_relay_behind_tls(secure_receiver) -> None:
    [health] = check_relays([secure_receiver[0].url])
    assert not health.ready
    assert "CERTIFICATE_VERIFY_FAILED" in health.detail["error"]


@pytest.mark.parametrize("trusted", [False, True])
def test_kafka_verifies_where_tls_is_asked_for(secure_receiver, trusted) -> None:
    """Whom nobody vouches for, and whose certificate is of another name."""
    kafka = pytest.importorskip("conquiet.relay.sinks.kafka")
    receiver, certificate = secure_receiver
    place = receiver.url.removeprefix("https://").rstrip("/")
    settings = {"security.protocol": "ssl"}
    if trusted:
        settings["ssl.ca.location"] = str(certificate)
    sink = kafka.KafkaSink(place, "orders", timeout=1, settings=settings)
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.check()
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.publish([Message(b"{}", dict(EVENT))])
    sink.close()
