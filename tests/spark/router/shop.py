"""A router for the tests on Spark: its effects can be counted, and it can be made to fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from tests.waiting import eventually

from conquiet import Message, Router
from conquiet.middleware import DeadLetter
from conquiet.sql import Inbox, Outbox, Transaction, connection


class Sell(msgspec.Struct):
    id: int


class Sold(msgspec.Struct):
    id: int


def engine_of(url: str, **settings: Any) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), **settings)


def create_tables(url: str) -> sa.Engine:
    from conquiet.sql.schema import migrate

    engine = engine_of(url, poolclass=sa.NullPool)
    migrate(engine)
    with engine.begin() as connected:
        connected.execute(sa.text("CREATE TABLE sales (place serial, id int, key text)"))
    return engine


def sales(engine: sa.Engine) -> list[int]:
    with engine.connect() as connected:
        return sorted(connected.execute(sa.text("SELECT id FROM sales")).scalars())


def outbox_size(engine: sa.Engine) -> int:
    with engine.connect() as connected:
        return connected.execute(sa.text("SELECT count(*) FROM outbox")).scalar_one()


def make_router(
    url: str,
    *,
    redis_url: str | None = None,
    notes: Path | None = None,
    dies_at: int | None = None,
    dies_after_commit: bool = False,
    ends_executor: bool = False,
    straggles_at: int | None = None,
) -> Router:
    """A shop that fails for ever on negative ids; with `dies_at`, its process dies there once."""
    engine = engine_of(url)
    router = Router()
    if notes is not None:
        with (notes / "made").open("a") as file:
            file.write(f"{os.getpid()}\n")
    if redis_url is not None:
        router.use(DeadLetter(_letters(redis_url), max_attempts=3))
    if dies_after_commit:
        router.use(dying(notes, dies_at))
    if straggles_at is not None:
        router.use(straggling(notes, straggles_at))
    router.use(Transaction(engine), Inbox("shop"), Outbox("sold"))

    @router.command(source="/shop", type="sell")
    def sell(order: Sell, message: Message[Any]) -> list[Sold]:
        if order.id < 0:
            raise ValueError(f"{order.id} is less than nothing")
        if order.id == dies_at and not dies_after_commit:
            die_once(notes, ends_executor)
        statement = sa.text("INSERT INTO sales (id, key) VALUES (:id, :key)")
        with connection(engine) as connected:
            connected.execute(statement, {"id": order.id, "key": message.key})
        return [Sold(order.id)]

    return router


def _letters(url: str) -> Any:
    import redis

    from conquiet.redis import StreamSink

    return StreamSink(redis.Redis.from_url(url))


def dying(notes: Path | None, dies_at: int | None) -> Any:
    """A middleware: the process dies once, after the commit of that order's slice."""

    def middleware(next: Any) -> Any:
        def process(batch: Sequence[Message[Any]]) -> Any:
            results = next(batch)
            if has_order(batch, dies_at):
                die_once(notes)
            return results

        return process

    return middleware


def straggling(notes: Path | None, at: int) -> Any:
    """A middleware: the first attempt at that order waits until there is a second one."""
    assert notes is not None
    first, second = notes / "first", notes / "second"

    def middleware(next: Any) -> Any:
        def process(batch: Sequence[Message[Any]]) -> Any:
            if has_order(batch, at):
                try:
                    first.touch(exist_ok=False)
                except FileExistsError:
                    second.touch()
                eventually(second.exists, timeout=120)
            return next(batch)

        return process

    return middleware


def has_order(batch: Sequence[Message[Any]], number: int | None) -> bool:
    return any(msgspec.json.decode(message.data)["id"] == number for message in batch)


def die_once(notes: Path | None, ends_executor: bool = False) -> None:
    assert notes is not None
    try:
        (notes / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    if ends_executor:
        os.kill(executor_pid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def executor_pid() -> int:
    """The JVM above this Python worker, which the daemon of the workers stands between."""
    daemon = os.getppid()
    fields = Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


shop = partial(partial, make_router)
"""`shop(url, …)` is what a SparkWorker takes."""


def orders(spark: Any, first: int, last: int, partitions: int = 2) -> Any:
    """Rows as the sources give them, for ids from `first` to before `last`."""
    return spark.range(first, last, 1, partitions).selectExpr(
        "'orders' AS stream",
        "concat('1-', id + 1000) AS entry_id",
        "cast(id % 5 AS string) AS key",
        "concat('e-', id) AS event_id",
        "'sell' AS type",
        "'/web' AS source",
        "cast(concat('{\"id\": ', id, '}') AS binary) AS data",
    )
