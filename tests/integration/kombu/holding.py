"""A process that takes messages and holds them: `holding.py URL COUNT OPTIONS`."""

from __future__ import annotations

import json
import sys
import time

import kombu

import conquiet.kombu  # noqa: F401 - registers redis-streams://


def main() -> None:
    url, count, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    held = []
    with kombu.Connection(url, transport_options=options) as connection:
        queue = kombu.Queue("orders")
        with connection.Consumer(
            queue, callbacks=[lambda body, message: held.append(message)], prefetch_count=count
        ):
            while len(held) < count:
                connection.drain_events(timeout=20)
            print("holding", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
