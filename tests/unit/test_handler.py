from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import msgspec
import pydantic
import pytest
from tests.unit.chains import Ledger, OrderPlaced, PlaceOrder, router_with

from conquiet import Message, Router
from conquiet.errors import ConfigError, GivenBack, HandlerError, StoreError
from conquiet.event import type_name
from conquiet.handler import Handler, Kind


@dataclass
class Shipped:
    id: int


class Paid(pydantic.BaseModel):
    id: int


class Cancelled(TypedDict):
    id: int


def outputs_of(function: Any, *, ledger: Ledger | None = None, **options: Any) -> list[Message]:
    router = Router()
    router.command(source="/orders", **options)(function)
    [result] = router.process([(ledger or Ledger()).message(7)])
    if isinstance(result, Exception):
        raise result
    return list(result)


def test_a_class_names_its_message_type():
    class HTTPServerStarted: ...

    class Order2Placed: ...

    class Renamed:
        __message_type__: ClassVar[str] = "com.example.renamed"

    assert type_name(OrderPlaced) == "order.placed"
    assert type_name(HTTPServerStarted) == "http.server.started"
    assert type_name(Order2Placed) == "order2.placed"
    assert type_name(Renamed) == "com.example.renamed"


def test_outputs_get_id_type_source_time_and_version():
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id), OrderPlaced(order.id)]

    first, second = outputs_of(place)
    assert first.type == "order.placed"
    assert first.source == "/orders"
    assert first.time is not None
    assert first.attributes["specversion"] == "1.0"
    assert first.data == OrderPlaced(7)
    assert first.id != second.id


@pytest.mark.parametrize("event", [OrderPlaced(7), Shipped(7), Paid(id=7)])
def test_events_of_every_class_are_taken(event):
    def place(order: PlaceOrder) -> Any:
        return event

    [output] = outputs_of(place)
    assert output.type == type_name(type(event))
    assert output.data is event


def test_a_typed_dict_is_named_by_the_return_hint():
    def cancel(order: PlaceOrder) -> list[Cancelled]:
        return [{"id": order.id}]

    [output] = outputs_of(cancel)
    assert (output.type, output.data) == ("cancelled", {"id": 7})


def test_a_generator_may_yield_events():
    def place(order: PlaceOrder) -> Iterator[OrderPlaced]:
        yield OrderPlaced(1)
        yield OrderPlaced(2)

    assert [output.data.id for output in outputs_of(place)] == [1, 2]


def test_an_async_generator_may_yield_events():
    async def place(order: PlaceOrder) -> AsyncIterator[OrderPlaced]:
        yield OrderPlaced(1)
        await asyncio.sleep(0)
        yield OrderPlaced(2)

    assert [output.data.id for output in outputs_of(place)] == [1, 2]


def test_a_message_as_output_keeps_what_the_handler_set():
    def place(order: PlaceOrder) -> Message[OrderPlaced]:
        return Message(OrderPlaced(7), {"id": "mine", "subject": "order/7"})

    [output] = outputs_of(place)
    assert (output.id, output.subject) == ("mine", "order/7")
    assert (output.type, output.source) == ("order.placed", "/orders")


def test_a_message_of_bytes_without_type_is_refused():
    def place(order: PlaceOrder) -> Message[bytes]:
        return Message(b"x")

    with pytest.raises(HandlerError, match=r"for place.order id=7.* it needs a type"):
        outputs_of(place)


@pytest.mark.parametrize("wrong", [7, "text", b"bytes", {"id": 1}, [1], [None], object()])
def test_returning_the_wrong_thing_names_handler_message_and_rule(wrong):
    def place(order: PlaceOrder) -> Any:
        return wrong

    with pytest.raises(HandlerError, match=r"handler place returned .* for place.order id=7"):
        outputs_of(place)


def test_none_is_no_output():
    def place(order: PlaceOrder) -> None:
        return None

    assert outputs_of(place) == []


def test_an_event_handler_must_not_return():
    router = Router()

    @router.event()
    def react(order: PlaceOrder):
        return [OrderPlaced(1)]

    [result] = router.process([Ledger().message(1)])
    assert isinstance(result, HandlerError)
    assert "use @router.command" in str(result)


def test_an_event_handler_that_says_it_returns_is_refused_at_registration():
    with pytest.raises(ConfigError, match="an event handler returns nothing"):

        @Router().event()
        def react(order: PlaceOrder) -> list[OrderPlaced]:
            return []


def test_a_second_parameter_gets_the_message():
    seen: list[Message] = []

    def place(order: PlaceOrder, message: Message) -> None:
        seen.append(message)

    outputs_of(place)
    assert seen[0].id == "7"


def test_partials_methods_and_callable_objects_are_handlers():
    class Service:
        def place(self, order: PlaceOrder) -> list[OrderPlaced]:
            return [OrderPlaced(order.id)]

        def __call__(self, order: PlaceOrder) -> list[OrderPlaced]:
            return [OrderPlaced(order.id)]

    def bound(prefix: str, order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    def last(order: PlaceOrder, *, prefix: str) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    for function in (Service().place, Service(), functools.partial(last, prefix="x")):
        assert outputs_of(function)[0].data == OrderPlaced(7)
    assert outputs_of(functools.partial(bound, "x"))[0].data == OrderPlaced(7)


def test_async_handlers_run_on_the_routers_loop():
    loops: list[asyncio.AbstractEventLoop] = []

    async def place(order: PlaceOrder) -> list[OrderPlaced]:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [OrderPlaced(order.id)]

    router = Router()
    router.command(source="/orders")(place)
    results = router.process(Ledger().batch(3))
    assert [result[0].data.id for result in results] == [0, 1, 2]
    assert len(set(map(id, loops))) == 1
    router.close()


def test_a_plain_decorator_around_an_async_handler_is_awaited():
    def noted(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return function(*arguments)  # the coroutine, not its result

        return wrapper

    @noted
    async def place(order: PlaceOrder) -> list[OrderPlaced]:
        await asyncio.sleep(0)
        return [OrderPlaced(order.id)]

    assert outputs_of(place)[0].data == OrderPlaced(7)


def test_a_plain_decorator_that_runs_an_async_handler_itself_is_sync():
    def awaited(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return asyncio.run(function(*arguments))

        return wrapper

    @awaited
    async def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    assert outputs_of(place)[0].data == OrderPlaced(7)


def poisoned(calls: list[list[int]]) -> Any:
    """A batch handler that fails on the order 1."""

    def handle(orders: list[PlaceOrder]) -> None:
        calls.append([order.id for order in orders])
        if any(order.id == 1 for order in orders):
            raise ValueError("poison")

    return handle


def test_a_batch_handler_that_fails_runs_its_messages_one_by_one():
    ledger, calls = Ledger(), []
    router_with(poisoned(calls)).process(ledger.batch(4))
    assert calls == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert ledger.acked == ["0", "2", "3"]
    assert str(ledger.nacked["1"]) == "poison"


def test_a_batch_handler_that_fails_lets_no_message_overtake_the_failed_one_of_its_key():
    ledger, calls = Ledger(), []
    batch = ledger.batch(6)
    for number in (1, 3, 5):
        batch[number].order_key = "k"
    batch.insert(5, ledger.message("other", b"", type="other.type"))
    router = router_with(poisoned(calls))
    router.event(type="other.type")(ignore)
    router.process(batch)
    assert calls == [[0, 1, 2, 3, 4], [0], [1], [2], [4]]
    assert ledger.acked == ["0", "2", "4", "other"]
    assert isinstance(ledger.nacked["3"], GivenBack)
    assert isinstance(ledger.nacked["5"], GivenBack)


def test_a_batch_handler_whose_store_is_away_is_not_called_for_each_message():
    ledger, calls = Ledger(), []

    def handle(orders: list[PlaceOrder]) -> None:
        calls.append(len(orders))
        raise StoreError("away")

    router_with(handle).process(ledger.batch(4))
    assert calls == [4]
    assert len(ledger.nacked) == 4


def ignore(data: bytes) -> None: ...


def test_a_batch_handler_gets_consecutive_messages_in_one_call():
    calls: list[list[int]] = []
    router = Router()

    @router.command(source="/orders")
    def place(orders: list[PlaceOrder]) -> list[OrderPlaced]:
        calls.append([order.id for order in orders])
        return [OrderPlaced(order.id) for order in orders]

    @router.event()
    def shipped(event: Shipped) -> None: ...

    ledger = Ledger()
    batch = [*ledger.batch(2), ledger.message(2, type="shipped"), ledger.message(3)]
    results = router.process(batch)
    assert calls == [[0, 1], [3]]
    assert [[output.data.id for output in result] for result in results] == [[0], [1], [], [3]]


@pytest.mark.parametrize("wrong", [[], [OrderPlaced(1), OrderPlaced(2)], OrderPlaced(1), 7])
def test_a_batch_handler_must_answer_for_every_message(wrong):
    router = Router()

    @router.command(source="/orders")
    def place(orders: list[PlaceOrder]) -> Any:
        return wrong

    results = router.process(Ledger().batch(3))
    assert all("return one item per message" in str(result) for result in results)


def test_a_raw_handler_takes_the_message_and_returns_messages():
    router = Router()

    @router.raw(source="/copy")
    def copy(message: Message) -> Message:
        return Message(message.data, {"type": "copied"})

    [[output]] = router.process([Ledger().message(1, type="anything")])
    assert (output.data, output.type, output.source) == (b'{"id": 1}', "copied", "/copy")
    assert "datacontenttype" not in output.attributes


def test_a_raw_handler_that_returns_data_is_told_so():
    router = Router()

    @router.raw()
    def wrong(message: Message) -> Any:
        return OrderPlaced(1)

    [result] = router.process([Ledger().message(1)])
    assert "a raw handler returns Message objects" in str(result)


class Odd(BaseException):
    """What a library might raise past `except Exception`."""


LEAVING = [SystemExit(1), GeneratorExit(), asyncio.CancelledError(), Odd()]


@pytest.mark.parametrize("error", LEAVING)
def test_a_handler_cannot_end_the_process(error):
    router = Router()

    @router.event()
    def leave(order: PlaceOrder) -> None:
        raise error

    [result] = router.process([Ledger().message(1)])
    assert isinstance(result, HandlerError)
    assert "tried to end the process" in str(result)
    assert "id=1" in str(result)


@pytest.mark.parametrize("error", LEAVING)
def test_a_generator_cannot_end_the_process_either(error):
    router = Router()

    @router.command(source="/orders")
    def leave(order: PlaceOrder) -> Any:
        yield OrderPlaced(1)
        raise error

    [result] = router.process([Ledger().message(1)])
    assert isinstance(result, HandlerError)


@pytest.mark.parametrize("error", LEAVING)
def test_an_async_handler_cannot_end_the_loop_that_the_others_run_on(error):
    router = Router()

    @router.event()
    async def leave(order: PlaceOrder) -> None:
        if order.id == 1:
            raise error

    ledger = Ledger()
    [left], [stayed] = router.process([ledger.message(1)]), router.process([ledger.message(2)])
    router.close()
    assert isinstance(left, HandlerError)
    assert stayed == ()


def test_ctrl_c_in_the_main_thread_passes():
    router = Router()

    @router.event()
    def interrupted(order: PlaceOrder) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        router.process([Ledger().message(1)])


def test_one_message_object_returned_twice_is_two_events():
    constant = Message(OrderPlaced(1), {"source": "/orders"}, topic="orders")
    constant.locals["note"] = "kept"
    router = Router()

    @router.raw()
    def repeat(message: Message) -> list[Message]:
        return [constant, constant]

    [first], [second] = router.process([Ledger().message(1)]), router.process([Ledger().message(2)])
    events = [*first, *second]
    assert len({event.id for event in events}) == 4
    assert {event.topic for event in events} == {"orders"}
    assert {event.locals["note"] for event in events} == {"kept"}
    assert constant.attributes == {"source": "/orders"}


def test_a_batch_handler_may_pass_on_the_inputs_of_its_neighbours():
    ledger, router = Ledger(), Router(ack="forward")

    @router.raw()
    def swap(messages: list[Message]) -> list[Message]:
        return messages[::-1]

    inputs = [ledger.message(1), ledger.message(2)]
    for message in inputs:
        message.topic = "commands"
    outputs = [output for result in router.process(inputs) for output in result]
    assert [output.topic for output in outputs] == [None, None]
    for output in outputs:
        output.ack()
    assert all(message.acking.settled for message in inputs)


def test_what_a_handler_takes_is_checked_at_registration():
    router = Router()
    with pytest.raises(ConfigError, match="needs a hint of its parameter"):
        router.event()(lambda order: None)
    with pytest.raises(ConfigError, match="use a msgspec Struct"):

        @router.event()
        def number(value: int) -> None: ...

    with pytest.raises(ConfigError, match="raw handlers take Message"):

        @router.event()
        def whole(message: Message) -> None: ...

    with pytest.raises(ConfigError, match="raw handlers take Message"):

        @router.raw()
        def data(order: PlaceOrder) -> None: ...

    with pytest.raises(ConfigError, match="takes 3 arguments"):

        @router.event()
        def many(order: PlaceOrder, message: Message, more: int) -> None: ...

    with pytest.raises(ConfigError, match="add type="):

        @router.event()
        def untyped(data: dict) -> None: ...


@pytest.mark.parametrize("hint", [Any, object, None, type(None)])
def test_a_return_hint_that_names_no_event_declares_no_output(hint):
    def place(order: PlaceOrder): ...

    place.__annotations__["return"] = hint
    assert not Handler(place, Kind.COMMAND, source="/s").declares_outputs


@pytest.mark.parametrize("name", ["Missing", "kind"])  # the latter is a local of our own
def test_hints_that_name_nothing_are_named(name):
    def place(order) -> None: ...

    place.__annotations__["order"] = name
    with pytest.raises(ConfigError, match=rf"handler place cannot be resolved.*{name}"):
        Handler(place, Kind.EVENT)


def test_a_struct_that_is_iterable_is_one_event():
    class Bag(msgspec.Struct):
        items: list[int]

        def __iter__(self) -> Iterator[int]:
            return iter(self.items)

    def place(order: PlaceOrder) -> Bag:
        return Bag([1, 2])

    [output] = outputs_of(place)
    assert output.type == "bag"
