"""Keys: where everything lies in Redis, under a namespace of our own."""

from __future__ import annotations

GROUP = "conquiet"
"""The one consumer group of every stream; two groups would handle each message twice."""

BACK = "~back"
"""The consumer that holds what was given back; every fetch empties it first."""

PRIORITIES = range(10)


class Keys:
    """The key of each thing. Lists of the same queue name are never touched.

    >>> Keys("shop:").stream("orders", 3)
    'shop:conquiet:kombu:q:3:orders'
    """

    def __init__(self, prefix: str = "") -> None:
        self.namespace = f"{prefix}conquiet:kombu:"
        self.queues = self.namespace + "queues"
        self.exchanges = self.namespace + "exchanges"
        self.leases = self.namespace + "leases"
        self.gone = self.namespace + "gone"
        self._streams = self.namespace + "q:"

    def stream(self, queue: str, priority: int) -> str:
        # The priority stands first, so that a queue may have any name.
        return f"{self._streams}{priority}:{queue}"

    def streams(self, queue: str) -> list[str]:
        """Those of all priorities, whichever steps somebody else has set."""
        return [self.stream(queue, priority) for priority in PRIORITIES]

    def queue(self, stream: str) -> str:
        return stream[len(self._streams) :].partition(":")[2]

    def bindings(self, exchange: str) -> str:
        return f"{self.namespace}bindings:{exchange}"

    def dead(self, queue: str) -> str:
        return f"{self.namespace}dead:{queue}"
