"""The Kombu transport: declare, publish, consume, ack."""

from __future__ import annotations

import os
import socket
from collections import Counter

from kombu import Connection, Producer, Queue
from tests.faults import invariants
from tests.faults.crash.scenario import LEASE, SENT, Place, Scenario
from tests.faults.invariants import Facts
from tests.faults.seam import Seam

import conquiet.kombu  # noqa: F401 - registers the scheme

QUEUE = Queue("numbers")


class KombuTransport(Scenario):
    """A process publishes what it has not published yet, then consumes until all queues are empty.

    Accepted is what `publish` returned for; the process notes it in a file. Kombu delivers at
    least once: a message whose handler ran and whose ack was not sent runs again.
    """

    name = "Kombu transport"
    lease = LEASE
    warms_up = True

    def prepare(self, place: Place) -> None:
        (place.folder / "accepted").touch()

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        url = place.redis.replace("redis://", "redis-streams://", 1)
        options = {"lease": LEASE, "autoclaim_interval": 0.1, "polling_interval": 0.02}
        with Connection(url, transport_options=options) as connection:
            with connection.channel() as channel:
                self._publish(place, channel)
            self._consume(place, seam, connection)

    def _publish(self, place: Place, channel: object) -> None:
        accepted = (place.folder / "accepted").read_text().split()
        file = os.open(place.folder / "accepted", os.O_WRONLY | os.O_APPEND)
        QUEUE(channel).declare()
        producer = Producer(channel, serializer="json")
        for command in SENT:
            if command not in accepted:
                producer.publish(command, routing_key=QUEUE.name)
                os.write(file, f"{command}\n".encode())
        os.close(file)

    def _consume(self, place: Place, seam: Seam, connection: Connection) -> None:
        def handle(body: str, message: object) -> None:
            with seam.aside():
                place.client().hincrby("effects", body, 1)
            message.ack()  # type: ignore[attr-defined]

        with connection.Consumer([QUEUE], callbacks=[handle], prefetch_count=2):
            while True:
                with seam.aside():
                    if not _left(place):
                        break
                try:
                    connection.drain_events(timeout=0.05)
                except socket.timeout:  # noqa: UP041 - as Kombu raises it
                    pass

    def facts(self, place: Place) -> Facts:
        accepted = frozenset((place.folder / "accepted").read_text().split())
        with place.client() as client:
            handled = invariants.read_counts(client, "effects")
        facts = Facts(accepted, effects=Counter(set(handled)))
        facts.unsettled = [
            *_left(place),
            *(f"{c}, never handled," for c in set(SENT) - set(handled)),
        ]
        if sum(handled.values()) > len(SENT) + 2:
            facts.unsettled.append(f"{handled}: more than what one process may hold, which")
        return facts


def _left(place: Place) -> list[str]:
    """Entries of whatever streams there are: an acked one is deleted."""
    with place.client() as client:
        return [
            f"{key.decode()} {entry.decode()}"
            for key in client.scan_iter(_type="stream")
            for entry, _ in client.xrange(key)
        ]
