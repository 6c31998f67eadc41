"""A process that takes messages and holds them: `holding.py URL COUNT OPTIONS [busy] [gevent]`.

`busy`: it computes in the callback for 2 seconds, and then acks. `gevent`: threads are greenlets.
"""

from __future__ import annotations

import sys

if "gevent" in sys.argv:
    from gevent import monkey

    monkey.patch_all()

import json
import time

import kombu

import conquiet.kombu  # noqa: F401 - registers redis-streams://


def main() -> None:
    url, count, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    held = []

    def take(body: object, message: kombu.Message) -> None:
        held.append(message)
        if "busy" in sys.argv:
            print("holding", flush=True)
            end = time.monotonic() + 2
            while time.monotonic() < end:  # not a sleep, in which greenlets would run
                pass
            message.ack()

    with kombu.Connection(url, transport_options=options) as connection:
        queue = kombu.Queue("orders")
        with connection.Consumer(queue, callbacks=[take], prefetch_count=count):
            while len(held) < count:
                connection.drain_events(timeout=20)
            if "busy" in sys.argv:
                return
            print("holding", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
