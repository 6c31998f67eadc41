"""A certificate that nobody vouches for, or that is another's, is refused in one clear line."""

from __future__ import annotations

import contextlib
import ssl
import subprocess

import pytest
import redis
from sqlalchemy import make_url
from tests import needs
from tests.integration.redis import servers
from tests.unit.sinks.http_receiver import Receiver

from conquiet import Message, cli
from conquiet.cli.server_checks import _verification
from conquiet.errors import ConquietError, SinkUnavailable, StoreError
from conquiet.operations.presence import relays
from conquiet.redis import StreamSource
from conquiet.relay.inspection import Inspection
from conquiet.relay.sinks import HttpSink
from conquiet.spark.log.connection import connect
from conquiet.sql import Outbox, OutboxLog, engine, schema

EVENT = {"id": "1", "type": "sold", "source": "/shop"}


def _certificate(directory, names):
    """Self-signed, for these names."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", key, "-out", certificate, "-subj", "/CN=any"),
        *("-addext", f"subjectAltName={names}"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        needs.missing("openssl", error)
    return certificate, key


@pytest.fixture
def secure_redis(redis_server, tmp_path, monkeypatch):
    """Redis behind TLS: the URL of it, and the certificate; of another's name if so asked."""
    stack = contextlib.ExitStack()

    def opened(names="IP:127.0.0.1"):
        monkeypatch.setattr(servers, "_certificate", lambda place: _certificate(place, names))
        port, certificate = stack.enter_context(
            servers.tls_in_front_of(redis_server.port, tmp_path)
        )
        return f"rediss://127.0.0.1:{port}/0", certificate

    with stack:
        yield opened


def test_redis_by_every_door(secure_redis, capsys, sqlite_url) -> None:
    url, certificate = secure_redis()
    with (
        redis.Redis.from_url(url) as client,
        pytest.raises(StoreError, match="CERTIFICATE_VERIFY"),
    ):
        StreamSource(client, "orders", "billing").read(1, 0.1)
    with connect(url) as spark, pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY"):
        spark.ping()
    assert cli.main(["streams", "list", "--url", url]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "CERTIFICATE_VERIFY_FAILED" in line
    assert cli.main(["streams", "list", "--url", f"{url}?ssl_ca_certs={certificate}"]) == 0


def test_redis_of_another_name(secure_redis) -> None:
    url, certificate = secure_redis("DNS:elsewhere")
    with (
        redis.Redis.from_url(f"{url}?ssl_ca_certs={certificate}") as client,
        pytest.raises(redis.ConnectionError, match="certificate is not valid for"),
    ):
        client.ping()


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
    certificate, key = _certificate(tmp_path, "DNS:elsewhere")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Receiver(context) as receiver:
        yield receiver, certificate


def test_a_relay_publishes_nothing_to_a_stranger(
    shop, sqlite_url, secure_receiver, secure_redis, redis_client, caplog
) -> None:
    receiver, _ = secure_receiver
    for sink in (receiver.url, secure_redis()[0]):
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
    [health] = relays([secure_receiver[0].url])
    assert not health.ready
    assert "CERTIFICATE_VERIFY_FAILED" in health.detail["error"]


def test_kafka_verifies_where_tls_is_asked_for(secure_receiver) -> None:
    kafka = pytest.importorskip("conquiet.relay.sinks.kafka")
    place = secure_receiver[0].url.removeprefix("https://").rstrip("/")
    sink = kafka.KafkaSink(place, "orders", timeout=1, settings={"security.protocol": "ssl"})
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.check()
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.publish([Message(b"{}", dict(EVENT))])
    sink.close()


def test_postgresql_does_not_fall_back_once_it_must_verify(database_url) -> None:
    made = engine(f"{database_url}?sslmode=verify-full")
    with pytest.raises(ConquietError, match=r"server does not support SSL|certificate"):
        OutboxLog(made).read()
    made.dispose()


@pytest.mark.parametrize(
    ("url", "noticed"),
    [
        ("postgresql://db.example/shop", True),
        ("postgresql://db.example/shop?sslmode=require", True),
        ("postgresql://db.example/shop?sslmode=verify-full", False),
        ("postgresql://127.0.0.1/shop", False),
        ("postgresql:///shop?host=/run/postgresql", False),
        ("sqlite:///shop.sqlite", False),
    ],
)
def test_doctor_notices_a_database_that_is_not_verified(url, noticed, monkeypatch) -> None:
    monkeypatch.delenv("PGSSLMODE", raising=False)
    assert bool(list(_verification(make_url(url)))) is noticed
