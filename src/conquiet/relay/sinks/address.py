"""Sinks by the scheme of their URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conquiet.errors import ConfigError
from conquiet.relay.sinks.http import HttpSink
from conquiet.relay.sinks.kafka import KafkaSink
from conquiet.relay.sinks.kombu import KombuSink
from conquiet.relay.sinks.needed import needed
from conquiet.relay.sinks.pubsub import PubSubSink
from conquiet.relay.sinks.url import trouble
from conquiet.sink import Sink


def _redis(url: str, topic: str | None) -> Sink:
    redis: Any = needed("redis", "redis")
    room: Any = needed("conquiet.redis", "redis")
    try:
        client = redis.Redis.from_url(url)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the URL of the Redis sink: {trouble(error, url)}") from None
    return room.StreamSink(client, topic)  # type: ignore[no-any-return]


_SINKS: dict[str, Callable[[str, str | None], Sink]] = {
    "redis": _redis,
    "rediss": _redis,
    "pubsub": PubSubSink.from_url,
    "kafka": KafkaSink.from_url,
    "amqp": KombuSink.from_url,
    "amqps": KombuSink.from_url,
    "http": HttpSink.from_url,
    "https": HttpSink.from_url,
}


def sink_from_url(url: str, *, topic: str | None = None) -> Sink:
    """The sink that a URL names; `topic` is for messages that name none.

    >>> type(sink_from_url("https://example.com/events?tenant=7", topic="pf-domain-events"))
    <class 'conquiet.relay.sinks.http.HttpSink'>

    `kombu+` stands before the URL of a transport of Kombu: `kombu+sqs://…?queues=events`.
    """
    scheme = url.partition(":")[0]
    make = KombuSink.from_url if scheme.startswith("kombu+") else _SINKS.get(scheme)
    if make is None or "://" not in url:
        # Without the URL itself, which may hold a password.
        choices = ", ".join(f"{name}://" for name in [*_SINKS, "kombu+…"])
        raise ConfigError(f"a sink of kind {scheme!r:.40} is unknown: choose one of {choices}")
    return make(url, topic)
