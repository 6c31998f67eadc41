"""Sinks by their URL."""

from __future__ import annotations

import sys

import pytest

from conquiet.errors import ConfigError
from conquiet.redis import StreamSink
from conquiet.relay.sinks import HttpSink, KafkaSink, KombuSink, PubSubSink, sink_from_url


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://localhost:6379/0", StreamSink),
        ("rediss://localhost:6379/0", StreamSink),
        ("pubsub://shop/orders?ordered=true&timeout=3", PubSubSink),
        ("kafka://localhost:9/orders?linger.ms=5", KafkaSink),
        ("amqp://guest:guest@localhost//?queues=a,b&mandatory=false", KombuSink),
        ("kombu+memory://?queues=events", KombuSink),
        ("http://localhost:1/events", HttpSink),
        ("https://localhost/events?tenant=7", HttpSink),
    ],
)
def test_a_url_names_a_sink(url: str, kind: type) -> None:
    sink = sink_from_url(url, topic="orders")
    assert type(sink) is kind
    sink.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("carrier-pigeon://secret@roof", "choose one of redis://"),
        ("nonsense", "choose one of redis://"),
        ("pubsub://shop/orders?ordered=perhaps", "choose true or false"),
        ("pubsub://shop/orders?colour=red", "'colour'"),
        ("pubsub:///orders", "needs a project"),
        ("kafka://localhost/orders?timeout=soon", "number of seconds"),
        ("kafka://localhost/orders?timeout=0", "above 0"),
        ("kafka://localhost/orders?timeout=inf", "3600 at most"),
        ("amqp://localhost?timeout=nan", "3600 at most"),
        ("http://to%0aken@host/", "'authorization'"),
        ("kafka://localhost/orders?colour=red", "colour"),
        ("kafka://localhost/orders?acks=0", "'acks'"),
        ("kafka:///orders", "needs servers"),
        ("kombu+memory://", "queues"),
        ("kombu+pigeon://roof?queues=a", "does not understand"),
        ("http:///path", "https://host/path"),
        ("http://host:port/", "URL of an HTTP sink"),
        ("http://[::1/", "URL of an HTTP sink"),
        ("kafka://[::1/", "URL of the sink"),
    ],
)
def test_a_url_that_names_none_says_what_to_change_and_no_secret(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sink_from_url(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("pubsub://shop/orders", "google.pubsub_v1", "pip install 'conquiet[pubsub]'"),
        ("kafka://localhost/orders", "confluent_kafka", "pip install 'conquiet[kafka]'"),
        ("amqp://localhost", "kombu", "pip install 'conquiet[kombu]'"),
        ("redis://localhost", "redis", "pip install 'conquiet[redis]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    url: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        sink_from_url(url)
    assert command in str(caught.value)
