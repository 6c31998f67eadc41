"""An app on SQLite: handlers, injection, ways to emit, what is refused, and its test client."""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import fastapi
import pytest
import redis
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from conquiet import App, Depends, Message, sql
from conquiet.cli import main
from conquiet.errors import ConfigError, HandlerError, StoreError
from conquiet.middleware import Correlation, Retry
from conquiet.testing import eventually


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


@dataclass
class PlaceOrder:
    id: str
    amount: int = 1


@dataclass
class OrderPlaced:
    id: str


@dataclass
class OrderShipped:
    id: str


ORDERS = "SELECT id FROM orders ORDER BY id"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App("shop", f"sqlite:///{tmp_path}/shop.db", metadata=Base.metadata)
    yield made
    made.close()


@pytest.fixture
def async_app(tmp_path: Path) -> App:
    return App("shop", f"sqlite+aiosqlite:///{tmp_path}/shop.db", metadata=Base.metadata)


def save(session: Session, order: PlaceOrder) -> None:
    session.add(Order(id=order.id, amount=order.amount))


# --- handlers -------------------------------------------------------------------------------


def test_a_command_that_comes_twice_takes_effect_once_with_its_event(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> OrderPlaced:
        save(session, order)
        return OrderPlaced(order.id)

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.redeliver() == 0
        assert shop.rows(ORDERS) == [("o-1",)]
        [placed] = shop.outbox
        assert (placed.type, placed.source, placed.topic) == ("order.placed", "/shop", "shop")
        assert placed.data == {"id": "o-1"}
        assert shop.dead_letters == []


def test_a_command_that_is_sent_again_with_its_id_takes_effect_once(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> None:
        save(session, order)

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"), id="c-1")
        shop.send(PlaceOrder("o-1"), id="c-1")
        assert shop.rows(ORDERS) == [("o-1",)]
        assert shop.dead_letters == []


def test_events_of_one_handler_reach_the_next_and_both_see_each_message_once(app: App) -> None:
    shipped: list[str] = []

    @app.on
    def place_order(order: PlaceOrder, connection: Connection) -> list[OrderPlaced]:
        connection.execute(text("INSERT INTO orders VALUES (:id, 1)"), {"id": order.id})
        return [OrderPlaced(f"{order.id}-{part}") for part in (1, 2)]

    @app.on
    def ship(placed: OrderPlaced, message: Message[Any]) -> OrderShipped:
        shipped.append(placed.id)
        assert message.type == "order.placed"
        return OrderShipped(placed.id)

    @app.on(name="count")
    def count_orders(placed: OrderPlaced) -> None: ...

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shipped == ["o-1-1", "o-1-2"]
        assert shop.redeliver() == 0
        types = [message.type for message in shop.outbox]
        assert types == ["order.placed"] * 2 + ["order.shipped"] * 2


def test_a_failed_handler_leaves_neither_effect_nor_event_but_a_dead_letter(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> Iterator[OrderPlaced]:
        save(session, order)
        yield OrderPlaced(order.id)
        raise ValueError("no stock")

    with app.test(max_attempts=2) as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.rows(ORDERS) == []
        assert shop.outbox == []
        [letter] = shop.dead_letters
        assert letter.message.data == {"id": "o-1", "amount": 1}
        assert "no stock" in letter.error


def test_a_handler_that_yields_runs_while_its_session_is_open(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> Iterator[OrderPlaced]:
        save(session, order)
        yield OrderPlaced(order.id)
        session.execute(select(Order)).one()

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.rows(ORDERS) == [("o-1",)]
        assert len(shop.outbox) == 1


def test_a_sent_command_without_a_handler_is_a_dead_letter_and_an_event_is_passed_over(
    app: App,
) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> OrderPlaced:
        return OrderPlaced(order.id)

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))  # its event has no handler
        assert shop.dead_letters == []
        shop.send(OrderShipped("o-1"))
        [letter] = shop.dead_letters
        assert "no handler for this type" in letter.error


def test_a_command_of_another_app_without_a_handler_is_a_dead_letter(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder) -> None: ...

    with app.test(max_attempts=1) as shop:
        office = App("office", shop.app.sessions)
        office.send(OrderShipped("o-1"), topic="shop")
        with office.sessions.begin() as session:
            office.emit(session, OrderShipped("o-2"), topic="shop")
        shop.deliver()
        assert [letter.message.data for letter in shop.dead_letters] == [{"id": "o-1"}]
        assert [event.data for event in shop.outbox] == [{"id": "o-2"}]


def test_a_topic_is_that_of_another_app(app: App) -> None:
    seen: list[str] = []

    @app.on(topic="payments", type="payment.received")
    def note(payment: dict[str, Any]) -> None:
        seen.append(payment["id"])

    @app.on
    def place_order(order: PlaceOrder) -> None: ...

    assert app.topics == ("shop", "payments")
    with app.test() as shop:
        shop.send({"id": "p-1"}, type="payment.received", topic="payments")
        shop.send({"id": "p-2"}, type="payment.received", topic="shop", kind="event")
        assert seen == ["p-1"]


def test_a_command_to_an_app_whose_handlers_are_all_for_others_is_a_dead_letter(app: App) -> None:
    @app.on(topic="payments")
    def place_order(order: PlaceOrder) -> None: ...

    with app.test(max_attempts=1) as shop:
        shop.send(PlaceOrder("o-1"))
        [letter] = shop.dead_letters
        assert "the matchers of place_order refused it" in letter.error


def test_a_client_that_is_not_open_reaches_nothing(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> None:
        session.add(Order(id=order.id, amount=order.amount))

    app.create_tables()
    client = app.test()
    for use in (
        lambda: client.send(PlaceOrder("o-1")),
        client.deliver,
        client.redeliver,
        lambda: client.rows(ORDERS),
        lambda: client.outbox,
        lambda: client.dead_letters,
    ):
        with pytest.raises(ConfigError, match=r"with app\.test"):
            use()
    with app.engine.connect() as connection:  # that of the app itself
        assert connection.scalar(text("SELECT count(*) FROM outbox")) == 0
    with client:
        client.send(PlaceOrder("o-1"))
    with client:  # once more, on another file
        assert client.redeliver() == 0
        assert client.rows(ORDERS) == []


def test_a_handler_registered_during_a_test_is_refused_and_not_forgotten(app: App) -> None:
    def place_order(order: PlaceOrder) -> None: ...

    with app.test(), pytest.raises(ConfigError, match="before"):
        app.on(place_order)
    assert not app.handlers


def test_a_parameter_that_may_be_none_is_given_all_the_same(app: App) -> None:
    given: list[Any] = []

    @app.on
    def place_order(
        order: PlaceOrder, session: Session | None = None, message: Message[Any] | None = None
    ) -> None:
        given.append((session, message))

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
    [(session, message)] = given
    assert isinstance(session, Session)
    assert isinstance(message, Message)


def test_a_test_ends_although_events_cause_each_other_without_end(app: App) -> None:
    @app.on
    def again(order: PlaceOrder) -> PlaceOrder:
        return order

    with app.test() as shop:
        app.send(PlaceOrder("o-1"))
        with pytest.raises(HandlerError, match=r"left after 0\.1 s; the last one: place\.order"):
            shop.deliver(timeout=0.1)


def test_a_raw_handler_takes_whole_messages(app: App) -> None:
    seen: list[str] = []

    @app.on(type="line")
    def note(message: Message[bytes], session: Session) -> None:
        seen.append(f"{message.id} {message.data!r} {type(session).__name__}")

    with app.test() as shop:
        shop.send(b"abc", type="line", id="l-1", datacontenttype="text/plain")
    assert seen == ["l-1 b'abc' Session"]


def test_a_partial_and_a_method_are_handlers_too(app: App) -> None:
    seen: list[str] = []

    def note(prefix: str, message: Message[bytes], session: Session) -> None:
        seen.append(f"{prefix} {message.type}")

    class Service:
        def place(self, order: PlaceOrder, session: Session) -> None:
            save(session, order)

    app.on(type="place.order")(partial(note, "got"))
    app.on(Service().place)
    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.rows(ORDERS) == [("o-1",)]
        assert shop.dead_letters == []
    assert seen == ["got place.order"]
    with pytest.raises(ConfigError, match="name it"):
        app.on("payments")  # type: ignore[type-var]


def test_a_handler_of_lists_gets_all_messages_and_one_session(app: App) -> None:
    sizes: list[int] = []

    @app.on
    def place_orders(
        orders: list[PlaceOrder], session: Session, messages: list[Message[Any]]
    ) -> None:
        sizes.append(len(orders))
        assert len(messages) == len(orders)
        for order in orders:
            save(session, order)

    with app.test() as shop:
        for number in range(3):
            app.send(PlaceOrder(f"o-{number}"))
        shop.deliver()
        assert sizes == [3]
        assert len(shop.rows(ORDERS)) == 3


def test_the_pure_style_finds_the_transaction_by_itself(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder) -> OrderPlaced:
        with sql.connection(app.engine) as connection:
            connection.execute(text("INSERT INTO orders VALUES (:id, 1)"), {"id": order.id})
        return OrderPlaced(order.id)

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        shop.redeliver()
        assert shop.rows(ORDERS) == [("o-1",)]


# --- async ----------------------------------------------------------------------------------


def test_async_handlers_share_the_transaction_of_an_async_database(async_app: App) -> None:
    @async_app.on
    async def place_order(order: PlaceOrder, session: AsyncSession) -> OrderPlaced:
        session.add(Order(id=order.id, amount=order.amount))
        return OrderPlaced(order.id)

    @async_app.on
    async def ship(placed: OrderPlaced, connection: AsyncConnection) -> AsyncIterator[OrderShipped]:
        found = await connection.execute(text(ORDERS))
        yield OrderShipped(found.scalar_one())

    @async_app.on
    def count(shipped: OrderShipped, session: Session) -> None:  # in a thread
        session.execute(text("UPDATE orders SET amount = amount + 1"))

    with async_app.test() as shop:
        shop.send(PlaceOrder("o-1", 7))
        assert shop.redeliver() == 0
        assert shop.rows("SELECT id, amount FROM orders") == [("o-1", 8)]
        assert [message.type for message in shop.outbox] == ["order.placed", "order.shipped"]
        assert shop.dead_letters == []


def test_an_async_handler_without_session_runs_on_a_sync_database(app: App) -> None:
    @app.on
    async def place_order(order: PlaceOrder, message: Message[Any]) -> OrderPlaced:
        await asyncio.sleep(0)
        return OrderPlaced(message.id)

    with app.test() as shop:
        sent = shop.send(PlaceOrder("o-1"))
        assert [message.data for message in shop.outbox] == [{"id": sent}]


# --- providers ------------------------------------------------------------------------------


class Mailer:
    def __init__(self, name: str) -> None:
        self.name = name


def test_providers_are_nested_called_once_per_message_and_closed(app: App) -> None:
    calls: list[str] = []

    def settings(message: Message[Any]) -> str:
        calls.append("settings")
        return message.type

    def open_mailer(name: Annotated[str, Depends(settings)]) -> Iterator[Mailer]:
        calls.append("open")
        yield Mailer(name)
        calls.append("close")

    sessions: list[Session] = []

    def audit(mailer: Annotated[Mailer, Depends(open_mailer)], session: Session) -> Mailer:
        sessions.append(session)
        return mailer

    @app.on
    def place_order(
        order: PlaceOrder,
        mailer: Annotated[Mailer, fastapi.Depends(open_mailer)],
        same: Annotated[Mailer, Depends(audit)],
        session: Session,
        classic: Any = Depends(open_mailer),  # noqa: B008
        retries: int = 3,
    ) -> None:
        assert mailer is same is classic
        assert session is sessions[-1]  # one session for the handler and its providers
        assert (mailer.name, retries) == ("place.order", 3)
        calls.append("handle")

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        shop.send(PlaceOrder("o-2"))
        assert shop.dead_letters == []
    assert calls == ["settings", "open", "handle", "close"] * 2


def test_a_provider_sees_the_error_of_its_handler(app: App) -> None:
    seen: list[str] = []

    def watch() -> Iterator[None]:
        try:
            yield None
        except ValueError as error:
            seen.append(str(error))
            raise

    @app.on
    def place_order(order: PlaceOrder, watched: Annotated[None, Depends(watch)]) -> None:
        raise ValueError(order.id)

    with app.test(max_attempts=1) as shop:
        shop.send(PlaceOrder("o-1"))
        assert len(shop.dead_letters) == 1
    assert seen == ["o-1"]


def test_a_provider_that_swallows_the_error_of_its_handler_commits_nothing(
    app: App, async_app: App
) -> None:
    def swallow() -> Iterator[None]:
        with suppress(ValueError):
            yield None

    @app.on
    def place_order(
        order: PlaceOrder, session: Session, nothing: Annotated[None, Depends(swallow)]
    ) -> None:
        session.add(Order(id=order.id, amount=order.amount))
        raise ValueError(order.id)

    @async_app.on(name="place_order")
    async def place_async(
        order: PlaceOrder, session: AsyncSession, nothing: Annotated[None, Depends(swallow)]
    ) -> None:
        session.add(Order(id=order.id, amount=order.amount))
        raise ValueError(order.id)

    for one in (app, async_app):
        with one.test(max_attempts=1) as shop:
            shop.send(PlaceOrder("o-1"))
            assert shop.rows(ORDERS) == []
            [letter] = shop.dead_letters
            assert "handler place_order failed, and a provider caught" in letter.error


def test_async_providers_run_on_the_loop_of_their_handler(async_app: App) -> None:
    calls: list[str] = []

    async def number() -> int:
        await asyncio.sleep(0)
        return 7

    async def open_mailer(given: Annotated[int, Depends(number)]) -> AsyncIterator[Mailer]:
        yield Mailer(str(given))
        calls.append("close")

    def plain() -> Iterator[str]:
        yield "plain"
        calls.append("close plain")

    @async_app.on
    async def place_order(
        order: PlaceOrder,
        mailer: Annotated[Mailer, Depends(open_mailer)],
        word: Annotated[str, Depends(plain)],
        session: AsyncSession,
    ) -> None:
        calls.append(f"{mailer.name} {word}")

    with async_app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.dead_letters == []
    assert calls == ["7 plain", "close plain", "close"]


def test_without_use_cache_each_parameter_has_a_value_of_its_own(app: App) -> None:
    @app.on
    def place_order(
        order: PlaceOrder,
        one: Annotated[list[int], Depends(list, use_cache=False)],
        other: Annotated[list[int], Depends(list, use_cache=False)],
        first: Annotated[Base, Depends(Base)],
        second: Annotated[Base, Depends()],
    ) -> None:
        assert one is not other
        assert first is second

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.dead_letters == []


class ShopSession(Session): ...


def test_a_session_factory_gives_sessions_of_its_class(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    app = App("shop", sessionmaker(engine, class_=ShopSession), metadata=Base.metadata)
    assert app.engine is engine

    @app.on
    def place_order(order: PlaceOrder, session: ShopSession) -> None:
        assert isinstance(session, ShopSession)
        save(session, order)

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.rows(ORDERS) == [("o-1",)]
    assert app.engine is engine
    assert list(tmp_path.iterdir()) == []  # the app's own database was not touched


def test_an_async_session_factory_serves_both_kinds_of_handlers(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    app = App("shop", async_sessionmaker(engine, expire_on_commit=False), metadata=Base.metadata)

    @app.on
    async def place_order(order: PlaceOrder, session: AsyncSession) -> OrderPlaced:
        session.add(Order(id=order.id, amount=1))
        return OrderPlaced(order.id)

    @app.on
    def ship(placed: OrderPlaced, session: Session) -> None:
        session.add(Order(id=f"{placed.id}-shipped", amount=1))

    with app.test() as shop:
        shop.send(PlaceOrder("o-1"))
        assert shop.rows(ORDERS) == [("o-1",), ("o-1-shipped",)]


# --- refusals -------------------------------------------------------------------------------


def make(value: Any = None) -> Any:
    async def provide() -> int:
        return 1

    return provide


def unprovided(order: PlaceOrder, mailer: Mailer) -> None: ...
def unannotated(order: PlaceOrder, mailer) -> None: ...  # type: ignore[no-untyped-def]
def takes_async_session(order: PlaceOrder, session: AsyncSession) -> None: ...
async def blocks_the_loop(order: PlaceOrder, session: Session) -> None: ...
async def async_on_sync(order: PlaceOrder, session: AsyncSession) -> None: ...
def async_provider(order: PlaceOrder, value: Annotated[int, Depends(make())]) -> None: ...
def wrong_class(order: PlaceOrder, session: ShopSession) -> None: ...
def list_of_messages(order: PlaceOrder, messages: list[Message[Any]]) -> None: ...
def no_data() -> None: ...
def takes_redis(order: PlaceOrder, client: redis.Redis) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unprovided, ["handler unprovided", "mailer: Mailer", "Depends(make_mailer)"]),
        (unannotated, ["handler unannotated", "mailer", "no annotation"]),
        (takes_async_session, ["handler takes_async_session", "'session'", "async driver"]),
        (blocks_the_loop, ["handler blocks_the_loop", "'session'", "block", "AsyncSession"]),
        (async_on_sync, ["handler async_on_sync", "'session'", "postgresql+asyncpg://"]),
        (async_provider, ["handler async_provider is not async", "provide"]),
        (wrong_class, ["handler wrong_class", "'session'", "class_=ShopSession"]),
        (list_of_messages, ["handler list_of_messages", "annotate 'messages' as Message"]),
        (no_data, ["handler no_data", "hint"]),
        (takes_redis, ["handler takes_redis", "'client'", "redis://"]),
    ],
)
def test_a_parameter_that_cannot_be_given_is_refused_when_the_handler_is_registered(
    app: App, function: Any, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        app.on(function)
    for word in words:
        assert word in str(caught.value)
    assert app.router.handlers == ()


def test_a_provider_of_a_provider_is_named_in_the_error(app: App) -> None:
    def outer(mailer: Mailer) -> int:
        return 1

    def place_order(order: PlaceOrder, value: Annotated[int, Depends(outer)]) -> None: ...

    with pytest.raises(ConfigError, match="provider outer of handler place_order: no provider"):
        app.on(place_order)


@pytest.mark.parametrize(
    ("database", "word"),
    [
        ("sqlite://", "name a file"),
        ("mysql://db/shop", "postgresql and sqlite"),
        (7, "give a URL"),
        (sessionmaker(), "has no engine"),
    ],
)
def test_a_database_that_cannot_be_used_is_refused(database: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        App("shop", database)


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("postgresql://localhost/shop", "psycopg", "pip install 'conquiet[postgres]'"),
        ("postgresql+asyncpg://localhost/shop", "asyncpg", "pip install asyncpg"),
        ("sqlite+aiosqlite:///shop.db", "aiosqlite", "pip install aiosqlite"),
    ],
)
def test_a_missing_driver_is_named_with_the_command_that_installs_it(
    url: str,
    package: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(f"{package} is not installed: {command}")):
        App("shop", url)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"shop_without_{package}"
    (tmp_path / f"{name}.py").write_text(f"import conquiet\napp = conquiet.App('shop', {url!r})\n")
    assert main(["run", f"{name}:app"]) == 2
    assert capsys.readouterr().err == (f"conquiet: error: {package} is not installed: {command}\n")


@pytest.mark.parametrize(
    ("url", "verifies"),
    [
        ("postgresql+asyncpg://db.example/shop", True),
        ("postgresql+asyncpg://db.example/shop?ssl=prefer", False),
        ("postgresql+asyncpg://localhost/shop", False),
    ],
)
def test_asyncpg_verifies_a_server_on_another_host(url: str, verifies: bool) -> None:
    """What the driver is given for its connection, which is not made here."""
    app = App("shop", url)
    given: dict[str, Any] = {}

    @event.listens_for(app.engine.sync_engine, "do_connect")
    def connect(dialect: Any, record: Any, arguments: Any, settings: dict[str, Any]) -> None:
        given.update(settings)
        raise ConnectionRefusedError

    async def ask() -> None:
        with pytest.raises(ConnectionRefusedError):
            async with app.engine.connect():
                pass

    asyncio.run(ask())
    context = given.get("ssl")
    assert isinstance(context, ssl.SSLContext) is verifies
    if isinstance(context, ssl.SSLContext):
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("sqs://region/queue", "a queue of SQS has no consumer groups"),
        ("stdout:", "without a broker the database is the log"),
        ("nonsense", "without a broker the database is the log"),
        ("kafka", "write the URL of one, as redis://"),
        ("amqp://localhost?queue=orders", "an app sets 'queue' itself"),
        ("kafka://localhost?exactly_once=position", "an app sets 'exactly_once' itself"),
        ("kafka://localhost/orders", "an app names its topics itself"),
    ],
)
def test_a_broker_that_cannot_be_used_is_refused(tmp_path: Path, broker: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        App("shop", f"sqlite:///{tmp_path}/shop.db", broker)


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("amqp://localhost?prefetch=0", "prefetch=0: must be from 1"),
        ("amqp://localhost?speed=high", "unknown setting 'speed'; choose from queue, topic"),
        ("kafka://localhost?start=later", "'beginning' or 'now'"),
        ("kafka://localhost?speed=high", 'No such configuration property: "speed"'),
    ],
)
def test_a_wrong_parameter_of_a_broker_is_named(tmp_path: Path, broker: str, words: str) -> None:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", broker)
    app.on(type="paid")(take_payment)
    with pytest.raises(ConfigError, match=words):
        app.sources()


@pytest.mark.parametrize("broker", ["amqp://localhost?speed=high", "kafka://localhost?speed=high"])
def test_an_app_that_only_emits_names_a_wrong_parameter_too(tmp_path: Path, broker: str) -> None:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", broker)
    app.create_tables()
    with pytest.raises(ConfigError, match="speed"):
        app.open()


@pytest.mark.parametrize(
    "broker",
    [
        "amqp://localhost?prefetch=9&heartbeat=5&queue_type=classic&dead_letters=lost&queues=all"
        "&mandatory=false&declare=false&timeout=3",
        "kafka://localhost?start=now&max_in_flight=9&dead_letters=lost&session.timeout.ms=9000"
        "&linger.ms=5&timeout=3",
    ],
)
def test_a_broker_takes_the_parameters_of_its_source_and_of_its_sink(
    tmp_path: Path, broker: str
) -> None:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", broker)
    app.on(type="paid")(take_payment)
    app.create_tables()
    running = app.open()
    assert running.relay is not None
    running.relay.sink.close()
    for worker in running.workers:
        worker.source.close()


def test_a_topic_that_a_broker_would_read_as_two_is_refused(tmp_path: Path) -> None:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db", "amqp://localhost")
    app.on(topic="payments,refunds", type="paid")(take_payment)
    with pytest.raises(ConfigError, match="'payments,refunds'"):
        app.sources()


def take_payment(data: dict[str, Any]) -> None: ...


def test_missing_tables_are_named_with_the_way_to_create_them(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder) -> None: ...

    with pytest.raises(ConfigError, match=r"no table .*outbox.*orders; .*--create-tables"):
        app.open()
    with pytest.raises(StoreError, match="no such table: outbox"):
        app.send(PlaceOrder("o-1"))
    app.create_tables()
    app.create_tables()
    app.check_tables()


def test_an_app_without_handlers_and_broker_has_nothing_to_run(app: App) -> None:
    app.create_tables()
    with pytest.raises(ConfigError, match="nothing to run"):
        app.open()


# --- ways to emit ---------------------------------------------------------------------------


def test_emit_writes_in_the_callers_transaction(app: App) -> None:
    with app.test() as shop:
        with app.sessions.begin() as session:
            ids = app.emit(session, OrderPlaced("o-1"), OrderShipped("o-1"), subject="o-1")
        with app.sessions() as session:
            app.emit(session, OrderPlaced("o-2"))
            session.rollback()
        with app.engine.begin() as connection:
            app.emit(connection, Message({"id": 3}, {"type": "order.lost", "id": "e-3"}))
        assert [message.id for message in shop.outbox] == [*ids, "e-3"]
        assert [message.subject for message in shop.outbox] == ["o-1", "o-1", ""]
        assert {message.source for message in shop.outbox} == {"/shop"}
        with (
            app.engine.begin() as connection,
            pytest.raises(ConfigError, match="one id for several"),
        ):
            app.emit(connection, OrderPlaced("a"), OrderPlaced("b"), id="e-4")


def test_emit_is_awaited_with_an_async_session(async_app: App) -> None:
    async def request() -> None:
        async with async_app.sessions.begin() as session:
            await async_app.emit(session, OrderPlaced("o-1"))
        assert await async_app.send_async(PlaceOrder("o-2"), topic="billing")

    with async_app.test() as shop:
        asyncio.run(request())
        assert [message.topic for message in shop.outbox] == ["shop", "billing"]


def test_a_handler_may_emit_by_its_session_but_not_send(app: App) -> None:
    @app.on
    def place_order(order: PlaceOrder, session: Session) -> None:
        app.emit(session, OrderPlaced(order.id))

    @app.on
    def ship(placed: OrderPlaced) -> None:
        app.send(PlaceOrder("another"))

    with app.test(max_attempts=1) as shop:
        shop.send(PlaceOrder("o-1"))
        assert [message.type for message in shop.outbox] == ["order.placed"]
        [letter] = shop.dead_letters
        assert "return it from the handler" in letter.error


def test_a_thing_without_a_type_cannot_be_sent(app: App) -> None:
    with pytest.raises(ConfigError, match="does not name a type"):
        app.send({"id": 1})


# --- middlewares, workers -------------------------------------------------------------------


def test_middlewares_are_placed_by_their_stage_and_others_outside(app: App) -> None:
    def outer(next: Any) -> Any:
        return next

    def inner(next: Any) -> Any:
        return next

    retry, correlation = Retry(), Correlation()
    app.use(correlation, retry, outer, inner)
    transaction, inbox, outbox = app.store.middlewares
    assert list(app.router.middlewares) == [
        outer, inner, retry, transaction, inbox, outbox, correlation,
    ]  # fmt: skip


def test_an_app_runs_as_workers_in_threads_and_stops(app: App) -> None:
    handled = threading.Event()

    @app.on
    def place_order(order: PlaceOrder, session: Session) -> OrderPlaced:
        save(session, order)
        handled.set()
        return OrderPlaced(order.id)

    app.create_tables()
    running = app.open()
    assert running.relay is None
    running.start()
    assert running.find_trouble() is None
    app.send(PlaceOrder("o-1"))
    eventually(lambda: sum(health.handled for health in running.health()) == 2)
    assert not running.is_over
    assert running.stop()
    assert running.is_over
    assert handled.is_set()


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_worker_that_cannot_start_stops_those_before_it(app: App, on_loop: bool) -> None:
    @app.on
    def place_order(order: PlaceOrder) -> None: ...

    @app.on(topic="other")
    def take(order: PlaceOrder) -> None: ...

    app.create_tables()
    running = app.open()
    first, second = running.workers
    second._state = "running"
    start = (lambda: asyncio.run(running.start_async())) if on_loop else running.start
    with pytest.raises(ConfigError, match="started once"):
        start()
    assert first.health().state == "stopped"


def test_an_app_runs_on_the_event_loop_of_its_caller(async_app: App) -> None:
    @async_app.on
    async def place_order(order: PlaceOrder, session: AsyncSession) -> None:
        session.add(Order(id=order.id, amount=1))

    async def count() -> int:
        async with async_app.sessions() as session:
            return len((await session.execute(text(ORDERS))).all())

    async def main() -> None:
        async with async_app:
            await async_app.send_async(PlaceOrder("o-1"))
            async with asyncio.timeout(10):
                while not await count():
                    await asyncio.sleep(0.01)

    async_app.create_tables()
    asyncio.run(main())


def test_the_engine_may_be_given(tmp_path: Path) -> None:
    engine: Engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    assert App("shop", engine).engine is engine
