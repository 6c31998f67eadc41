"""Somebody who sends commands, every thousandth of them poison."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import redis
from tests.faults.world.service import commands_of

PARTITIONS = 2
KEYS = 499  # odd, so that poison comes to both partitions
POISON_EVERY = 1_000
SENT_AT_ONCE = 100
MOST_AHEAD = 20_000
"""Commands that may wait; the sender waits then."""


class Sender:
    """Sends commands, and knows which were accepted: all that were ever sent, in the end."""

    def __init__(self, client: redis.Redis, rate: float, most: int | None) -> None:
        self._client = client
        self._rate = rate
        self._most = most
        self.sent = 0
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "the sender could not send its last batch"

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _send(self) -> None:
        began = time.monotonic()
        while not self.stopping.is_set() and (self._most is None or self.sent < self._most):
            if self._rate and self.sent > (time.monotonic() - began) * self._rate:
                time.sleep(0.02)
                continue
            if self._is_ahead():
                time.sleep(0.1)
                continue
            self._send_batch(self.sent)
            self.sent += SENT_AT_ONCE

    def _is_ahead(self) -> bool:
        if self.sent % (SENT_AT_ONCE * 20):
            return False
        with contextlib.suppress(redis.RedisError):
            return waiting_commands(self._client) > MOST_AHEAD
        return False

    def _send_batch(self, first: int) -> None:
        """Until it is confirmed: what was sent twice has the same id."""
        while True:
            try:
                pipeline = self._client.pipeline(transaction=False)
                for number in range(first, first + SENT_AT_ONCE):
                    key = number % KEYS
                    data = {"command": f"c-{number}", "key": f"k-{key}"}
                    data["hopeless"] = is_hopeless(number)
                    entry = {"specversion": "1.0", "id": f"c-{number}", "source": "/web"}
                    entry |= {"type": "place.order", "data": json.dumps(data)}
                    pipeline.xadd(commands_of(str(key % PARTITIONS)), entry)
                pipeline.execute()
                return
            except redis.RedisError:
                time.sleep(0.2)


def is_hopeless(number: int) -> bool:
    return number % POISON_EVERY == POISON_EVERY - 1


def waiting_commands(client: redis.Redis) -> int:
    """Roughly: what the workers have not read."""
    waiting = 0
    for partition in range(PARTITIONS):
        stream = commands_of(str(partition))
        for group in client.xinfo_groups(stream):
            waiting += group["pending"] + (group.get("lag") or 0)
    return waiting
