"""Publishing: a relay in a process of its own, whose sink stutters now and then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import redis

from conquiet.acking import Error
from conquiet.events.source import EventSource
from conquiet.message import Message
from conquiet.redis import StreamSink
from conquiet.relay import Relay
from conquiet.sink import Sink
from conquiet.sql import engine
from marketplace.demo.process import read_settings, report, when_orphaned
from marketplace.demo.settings import BATCH, TWICE

_POLL_SECONDS = 0.1


class Stutter:
    """A sink that publishes some messages twice, as every broker does sooner or later."""

    def __init__(self, sink: Sink, dice: Random, share: float = TWICE) -> None:
        self.repeated = 0
        self._sink = sink
        self._dice = dice
        self._share = share

    def publish(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        twice = [message for message in messages if self._dice.random() < self._share]
        self.repeated += len(twice)
        return self._sink.publish([*messages, *twice])[: len(messages)]

    def close(self) -> None:
        self._sink.close()


def main() -> int:
    settings = read_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    client: Any = redis.Redis.from_url(settings["broker"])
    sink = Stutter(StreamSink(client), Random(settings["seed"]))
    source = EventSource(engine(settings["database"]), cloudevents=True, poll=_POLL_SECONDS)
    relay = Relay(source, sink, batch_size=BATCH)
    when_orphaned(relay.stop)
    report(ready=True)
    relay.run()
    report(published=relay.published, repeated=sink.repeated)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
