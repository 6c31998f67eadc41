"""A relay whose sink fails one message in twenty and hangs now and then: `flaky_relay.py FLAGS`.

It is `conquiet relay run` with one more kind of sink. A hang is before or after what was to be
published has gone out; it outlasts `--stuck-after-seconds`, so the process ends itself.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

from conquiet import registry
from conquiet.cli import main

FAILS = 0.05
HANGS = 0.05
HANG_SECONDS = 30


class FlakySink:
    def __init__(self, sink) -> None:
        self._sink = sink
        self._chance = random.Random()

    def publish_each(self, messages):
        self._hang()
        chosen = [self._chance.random() >= FAILS for _ in messages]
        sent = iter(
            self._sink.publish_each(
                [m for m, is_sent in zip(messages, chosen, strict=True) if is_sent]
            )
        )
        self._hang()
        return [next(sent) if is_sent else ValueError("bad luck") for is_sent in chosen]

    def _hang(self) -> None:
        if self._chance.random() < HANGS / 2:
            time.sleep(HANG_SECONDS)

    def close(self) -> None:
        self._sink.close()


def open_flaky(url, settings):
    opened = registry.SINKS["redis"](url.removeprefix("flaky+"), settings)
    return replace(opened, sink=FlakySink(opened.sink))


if __name__ == "__main__":
    registry.SINKS["flaky+redis"] = open_flaky
    raise SystemExit(main(["relay", "run", *sys.argv[1:]]))
