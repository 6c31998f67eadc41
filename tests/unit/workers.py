"""Workers over a log of orders, and the routers they run."""

from __future__ import annotations

import threading
from typing import Any

from tests.unit.chains import PlaceOrder

from conquiet import Message, Router, Worker
from conquiet.memory import Log
from conquiet.message import new_id


def order(number: int, **attributes: Any) -> Message[PlaceOrder]:
    """A command to place the order of that number."""
    values = {"id": new_id(), "type": "place.order", "source": "/test", **attributes}
    return Message(PlaceOrder(number), values)


def log_of(count: int, **attributes: Any) -> Log:
    """A log that holds so many orders, from 0."""
    log = Log()
    log.sink("commands").publish([order(number, **attributes) for number in range(count)])
    return log


def start(workers: list[Worker], *arguments: Any, **options: Any) -> Worker:
    """Start a worker that the fixture `workers` stops."""
    worker = Worker(*arguments, **options)
    workers.append(worker)
    worker.start()
    return worker


def drained(log: Log, group: str = "g") -> bool:
    """Whether a group has settled all that the log holds."""
    return not log.unsettled(group)


def recording(seen: list[int]) -> Router:
    """A router whose handler writes down the number of each order."""
    router = Router()

    @router.event()
    def record(order: PlaceOrder) -> None:
        seen.append(order.id)

    return router


def blocking_router(running: threading.Event, release: threading.Event) -> Router:
    """A router whose handler tells that it runs, and waits to be released."""
    router = Router()

    @router.event()
    def block(order: PlaceOrder) -> None:
        running.set()
        release.wait(30)

    return router


def refusing(acked: Any, nacked: Any) -> None:
    """A `settle` of a source whose server is away."""
    raise ConnectionError("away")
