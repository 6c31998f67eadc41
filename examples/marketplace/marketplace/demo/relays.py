"""A relay process: publishes the outbox to the log, some events twice."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import redis

from conquiet.events import EventSource
from conquiet.redis import StreamSink
from conquiet.relay import Relay
from conquiet.sql import engine
from marketplace.demo.process import read_settings, report, when_orphaned
from marketplace.demo.sender import DuplicatingSink
from marketplace.demo.settings import BATCH_SIZE
from marketplace.generator.entry import DOMAIN_TOPIC

_POLL_SECONDS = 0.1


def main() -> int:
    settings = read_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    client: Any = redis.Redis.from_url(settings["broker"])
    sink = DuplicatingSink(StreamSink(client), Random(settings["seed"]))
    database = engine(settings["database"])
    source = EventSource(database, topic=DOMAIN_TOPIC, cloudevents=True, poll=_POLL_SECONDS)
    relay = Relay(source, sink, batch_size=BATCH_SIZE)
    when_orphaned(relay.stop)
    report(ready=True)
    relay.run()
    report(published=relay.published, duplicates=sink.duplicates)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
