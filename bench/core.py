"""The core in memory: a router with three middlewares and a handler that does nothing.

Every message is made, decoded, routed and settled; the floor is the handler's function,
called directly with data that was decoded the same way.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench.harness import Case, arguments, compare, measure, report
from conquiet import Acking, Message, Router
from conquiet.acking import Error
from conquiet.middleware import Correlation, Required, per_message

DATA = msgspec.json.encode({"id": 7, "note": "x" * 250})
ATTRIBUTES = {"id": "1", "type": "place.order", "source": "/bench", "subject": "7"}


class PlaceOrder(msgspec.Struct):
    id: int
    note: str


class Nowhere:
    """Settles into nothing, in one call per batch, as a source does."""

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        assert not nacked


def do_nothing(order: PlaceOrder) -> None: ...


def plain(next: Callable[..., Any]) -> Callable[..., Any]:
    return lambda batch: next(batch)


@per_message
def watch(message: Message[Any]) -> Any:
    yield


def routed(count: int, batch: int, *middlewares: Any) -> Callable[[], None]:
    router = Router()
    router.use(*middlewares)
    router.event()(do_nothing)
    nowhere = Nowhere()

    def run() -> None:
        for _ in range(count // batch):
            router.process(
                [
                    Message(DATA, dict(ATTRIBUTES), acking=Acking(nowhere, number))
                    for number in range(batch)
                ]
            )

    return run


def direct(count: int) -> Callable[[], None]:
    decode = msgspec.json.Decoder(PlaceOrder).decode

    def run() -> None:
        for _ in range(count):
            do_nothing(decode(DATA))

    return run


def settled(count: int) -> Callable[[], None]:
    nowhere = Nowhere()

    def run() -> None:
        for _ in range(count):
            Message(DATA, ATTRIBUTES, acking=Acking(nowhere, 1)).ack()

    return run


def main() -> None:
    options = arguments(__doc__)
    count, rounds = (20_000, 3) if options.quick else (100_000, 7)
    ours = (Required("subject"), plain, Correlation())
    seconds = measure(
        {
            "router, one by one": routed(count, 1, *ours),
            "router, batches of 200": routed(count, 200, *ours),
            "router, 3 per-message": routed(count, 200, watch, watch, watch),
            "make and settle": settled(count),
            "the function itself": direct(count),
        },
        rounds=rounds,
    )
    floor = "the function itself"

    def case(name: str, ours: str, **settings: str | int) -> Case:
        return compare(name, count, seconds, ours, floor, **settings)

    report(
        [
            case("router + 3 middlewares", "router, one by one", batch=1),
            case("router + 3 middlewares", "router, batches of 200", batch=200),
            case("router + 3 middlewares per message", "router, 3 per-message", batch=200),
            case("making and settling a message", "make and settle"),
        ],
        options,
    )


if __name__ == "__main__":
    main()
