"""The services as they run: a worker over a stream of commands, and a relay into the log."""

from __future__ import annotations

from tests.waiting import eventually

from conquiet.events import EventSource
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.worker import Worker
from marketplace.generator import DOMAIN_TOPIC
from marketplace.service import marketplace_router


def handle_all(engine, client, messages, timeout=60):
    """Send commands through a stream and a worker; ends when all are settled."""
    StreamSink(client, "commands").publish(messages)
    router = marketplace_router(engine, dead_letters=StreamSink(client, "dead-letters"))
    source = StreamSource(client, "commands", group="marketplace")
    worker = Worker(source, router, batch_size=50)
    worker.start()
    assert eventually(
        lambda: worker.health().handled >= len(messages) and not worker.health().in_flight,
        timeout=timeout,
    )
    assert worker.stop()
    return worker.health()


def relay_all(engine, client):
    """Publish every row of `outbox_events` that waits."""
    source = EventSource(engine, topic=DOMAIN_TOPIC, cloudevents=True)
    relay = Relay(source, StreamSink(client), batch_size=500)
    while relay.run_once(0.0).published:
        pass
    relay.source.close()
