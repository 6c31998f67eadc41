"""The router of the marketplace: a handler per command, a transaction per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from sqlalchemy import URL, Engine

from conquiet import Message, Router
from conquiet.events import EventsOutbox
from conquiet.handler import Process, Result
from conquiet.middleware import DeadLetter
from conquiet.sink import Sink
from conquiet.sql import Inbox, Transaction
from marketplace.service.ads import Ads, Rollups
from marketplace.service.orders import Orders
from marketplace.service.payments import Payments
from marketplace.service.stores import Licenses, Media
from marketplace.service.tables import ADS, ORDERS, Book, as_engine

SOURCE = "/marketplace"


def marketplace_router(
    engine: Engine | str | URL, *, dead_letters: Sink | None = None, attempts: int = 5
) -> Router:
    """Build the router of all commands, with inbox and outbox on the same database.

    >>> from marketplace.service import init
    >>> init("sqlite:///market.sqlite")
    >>> router = marketplace_router("sqlite:///market.sqlite")
    >>> len(router.handlers)
    21

    A command that breaks a rule becomes a dead letter at once, one that fails otherwise after
    its last attempt; without `dead_letters` it is nacked, and its source decides.
    """
    database = as_engine(engine)
    router = Router()
    if dead_letters is not None:
        router.use(DeadLetter(dead_letters, max_attempts=attempts))
    orders, ads = Book(database, ORDERS, "order"), Book(database, ADS, "ad")
    together = Together({"order_id": orders, "ad_id": ads})
    router.use(Transaction(database), Inbox("marketplace"), EventsOutbox(), together)
    for handler in _handlers(database, orders, ads):
        router.command(source=SOURCE)(handler)
    return router


def _handlers(engine: Engine, orders_book: Book, ads_book: Book) -> list[Callable[..., Any]]:
    orders, payments = Orders(engine, orders_book), Payments(engine, orders_book)
    licenses, ads = Licenses(engine), Ads(ads_book)
    return [
        *(orders.place_order, orders.accept_lines, orders.mark_ready, orders.dispatch_order),
        *(orders.deliver_order, orders.close_order, orders.cancel_order, orders.expire_order),
        *(payments.collect_cash, payments.settle_payment, payments.pay_out),
        *(licenses.submit_license, licenses.review_license, licenses.expire_license),
        *(ads.create_ad, ads.update_ad, ads.activate_ad, ads.pause_ad, ads.expire_ad),
        *(Media(engine).record_upload, Rollups(engine, ads_book).roll_up_ad),
    ]


class Together:
    """Middleware: reads the rows that a batch of commands is about by one statement per table, and
    writes those that have changed together, instead of two statements per command."""

    def __init__(self, books: Mapping[str, Book]) -> None:
        self._books = books
        """By the field of a command that has the id of a row."""

    def __call__(self, process: Process) -> Process:
        def run(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            with ExitStack() as stack:
                for name, book in self._books.items():
                    ids = (getattr(message.decoded, name, None) for message in batch)
                    stack.enter_context(book.batch(id_ for id_ in ids if id_ is not None))
                return process(batch)

        return run
