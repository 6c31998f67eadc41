"""The shop with its effects in Redis: sales, inbox and outbox in one MULTI … EXEC."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import redis
from tests.spark.router.shop import Sell, Sold, dying

from conquiet import Router
from conquiet.redis import Inbox, Outbox, Transaction, commands

SALES, OUTBOX = "sales", "outbox"


def make_router(
    url: str, *, notes: Path | None = None, dies_at: int | None = None, lease: float = 30.0
) -> Router:
    """With `dies_at`, its process dies once, after the commit of that order's slice."""
    client = redis.Redis.from_url(url)
    router = Router()
    router.use(dying(notes, dies_at))
    router.use(Transaction(client), Inbox("shop", lease=lease), Outbox("sold", OUTBOX))

    @router.command(source="/shop", type="sell")
    def sell(order: Sell) -> list[Sold]:
        commands(client).rpush(SALES, order.id)
        return [Sold(order.id)]

    return router


redis_shop = partial(partial, make_router)
