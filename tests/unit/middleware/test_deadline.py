"""Late messages do not run; handlers that take too long are interrupted; nothing else is."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial, wraps

import pytest
from tests.unit.middleware.routers import Order, atomic, nothing, order, placed, router_of

from conquiet import Message, Router
from conquiet.errors import ConfigError, DeadlineExceeded, ExpiredMessage, InvalidMessage
from conquiet.middleware import Deadline, Retry, deadline
from conquiet.middleware.deadline import Alarm, Interrupt, Timer, call_with_limit
from conquiet.testing import deliver

pytestmark = pytest.mark.usefixtures("untraced")

SHORT = 0.02  # seconds after which a handler that never ends is interrupted


def never_ends(*_):
    while True:
        time.sleep(0.001)


def expiring(seconds):
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


# --- expirytime -----------------------------------------------------------------------------


def test_a_message_past_its_expirytime_is_not_run():
    runs = []
    router = router_of(lambda m: runs.append(m.id), Deadline())
    delivered = deliver(router, order(1, expirytime=expiring(-5)), order(2))
    assert isinstance(delivered.errors[0], ExpiredMessage)
    assert "expired 5.0" in str(delivered.errors[0])
    assert runs == ["2"]


def test_a_message_before_its_expirytime_is_run():
    assert deliver(router_of(nothing, Deadline()), order(expirytime=expiring(60))).acked


def test_an_expirytime_without_zone_is_utc_and_one_that_is_no_time_is_refused():
    past = (datetime.now(UTC) - timedelta(hours=1)).replace(tzinfo=None).isoformat()
    router = router_of(nothing, Deadline())
    assert isinstance(deliver(router, order(expirytime=past)).errors[0], ExpiredMessage)
    delivered = deliver(router, order(expirytime="tomorrow"))
    assert isinstance(delivered.errors[0], InvalidMessage)


def test_without_the_middleware_an_expirytime_means_nothing():
    assert deliver(router_of(nothing), order(expirytime=expiring(-5))).acked


def test_an_expired_message_costs_its_neighbours_no_second_transaction():
    runs = []
    chain, _ = atomic(Deadline())
    deliver(
        router_of(lambda m: runs.append(m.id), *chain),
        order(1),
        order(2, expirytime=expiring(-1)),
        order(3),
    )
    assert runs == ["1", "3"]


def test_a_handler_is_interrupted_when_its_message_expires():
    delivered = deliver(router_of(never_ends, Deadline(60)), order(expirytime=expiring(0.05)))
    assert isinstance(delivered.errors[0], (DeadlineExceeded, ExpiredMessage))


def test_a_message_that_expires_between_two_tries_is_not_tried_again():
    tries = []

    def handle(message):
        tries.append(message.id)
        message.attributes["expirytime"] = expiring(-1)
        raise ValueError

    delivered = deliver(router_of(handle, Retry(5, first=0), Deadline()), order())
    assert isinstance(delivered.errors[0], ExpiredMessage)
    assert tries == ["1"]


# --- interrupting ---------------------------------------------------------------------------


def test_a_handler_that_never_ends_is_interrupted_and_the_error_names_it():
    delivered = deliver(router_of(never_ends, Deadline(SHORT)), order())
    [error] = delivered.errors
    assert isinstance(error, DeadlineExceeded)
    assert "handler handle did not end within 0.020 s on order id=1" in str(error)


def test_the_traceback_shows_where_the_handler_was():
    delivered = deliver(router_of(never_ends, Deadline(SHORT)), order())
    cause = delivered.errors[0].__cause__
    names = []
    step = cause.__traceback__
    while step is not None:
        names.append(step.tb_frame.f_code.co_name)
        step = step.tb_next
    assert "never_ends" in names


def test_the_neighbours_in_the_batch_are_not_interrupted():
    def handle(message):
        if message.id == "2":
            never_ends()

    delivered = deliver(router_of(handle, Deadline(SHORT)), order(1), order(2), order(3))
    assert [m.id for m in delivered.acked] == ["1", "3"]


def test_an_except_exception_does_not_keep_a_handler_alive():
    def handle(message):
        while True:
            try:
                never_ends()
            except Exception:
                continue

    assert deliver(router_of(handle, Deadline(SHORT)), order()).nacked


def test_a_handler_can_clean_up():
    cleaned = []

    def handle(message):
        try:
            never_ends()
        finally:
            cleaned.append(message.id)

    deliver(router_of(handle, Deadline(SHORT)), order())
    assert cleaned == ["1"]


def test_an_error_of_the_clean_up_does_not_hide_that_the_limit_was_exceeded():
    def handle(message):
        try:
            never_ends()
        finally:
            raise ConnectionError("another command is in progress")  # as an interrupted driver

    [error] = deliver(router_of(handle, Deadline(SHORT)), order()).errors
    assert isinstance(error, DeadlineExceeded)
    assert isinstance(error.__cause__, ConnectionError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_swallows_an_interrupt_is_interrupted_again(monkeypatch):
    monkeypatch.setattr(deadline, "_SECONDS_TO_END", 0.05)

    class Owner:
        def __del__(self):
            never_ends()  # Python drops an exception that arrives here

    def handle(message):
        Owner()
        never_ends()

    [error] = deliver(router_of(handle, Deadline(SHORT)), order()).errors
    assert isinstance(error, DeadlineExceeded)


def test_in_a_transaction_the_interrupted_one_is_rolled_back_and_the_others_commit():
    def handle(message):
        store.add("effects")
        if message.id == "2":
            never_ends()
        return [placed(int(message.id))]

    chain, store = atomic(Deadline(SHORT))
    delivered = deliver(router_of(handle, *chain), order(1), order(2), order(3))
    assert [m.id for m in delivered.acked] == ["1", "3"]
    assert store.get("effects") == 2
    assert len(store.outbox()) == 2


def test_each_try_has_the_whole_time():
    tries = []

    def handle(message):
        tries.append(message.id)
        if len(tries) < 3:
            never_ends()

    assert deliver(router_of(handle, Retry(3, first=0), Deadline(SHORT)), order()).acked
    assert len(tries) == 3


def test_a_batch_handler_has_the_time_of_all_its_messages():
    limits = []
    deadline = Deadline(5)
    router = Router()
    router.use(deadline)

    @router.event()
    def handle(orders: list[Order]) -> None:
        limits.append(deadline._seconds_for([order()] * len(orders)))

    deliver(router, order(1), order(2), order(3))
    assert limits == [15]


def test_a_batch_handler_is_interrupted_when_the_last_of_its_messages_expires():
    deadline = Deadline(1000)
    soon, later = order(expirytime=expiring(60)), order(expirytime=expiring(600))
    assert 500 < deadline._seconds_for([soon, later]) <= 600
    assert deadline._seconds_for([soon, order()]) == 2000


def test_a_batch_handler_that_never_ends_is_interrupted():
    router = Router()
    router.use(Deadline(SHORT))

    @router.event()
    def handle(orders: list[Order]) -> None:
        never_ends()

    delivered = deliver(router, order(1), order(2))
    for number, error in enumerate(delivered.errors, 1):  # of the single runs that follow
        assert isinstance(error, DeadlineExceeded)
        assert f"order id={number} source=/test" in str(error)


def test_a_handler_that_ends_in_time_is_left_alone():
    assert deliver(router_of(lambda _: [placed()], Deadline(60)), order()).outputs


def test_the_error_of_a_handler_passes():
    def handle(message):
        raise ValueError("own")

    delivered = deliver(router_of(handle, Deadline(60)), order())
    assert isinstance(delivered.errors[0], ValueError)


def test_handlers_in_many_threads_are_interrupted_each_for_itself():
    router = router_of(lambda m: never_ends() if int(m.id) % 2 else None, Deadline(SHORT))
    router.start()
    acked = {}

    def work(number):
        acked[number] = bool(deliver(router, order(number)).acked)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acked == {number: number % 2 == 0 for number in range(8)}


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_it_refuses_times_that_make_no_sense(seconds):
    with pytest.raises(ConfigError, match="above 0"):
        Deadline(seconds)


# --- async handlers -------------------------------------------------------------------------


def async_router(handle, *middlewares):
    router = Router()
    router.use(*middlewares)

    @router.raw(type="order", name="handle")
    async def run(order: Message) -> None:
        await handle(order)

    return router


@pytest.fixture
def closing():
    routers = []
    yield lambda router: routers.append(router) or router
    for router in routers:
        router.close()


def test_an_async_handler_that_never_ends_is_cancelled(closing):
    cancelled = []

    async def handle(order):
        if order.id == "0":
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(order.id)
            raise

    router = closing(async_router(handle, Deadline(SHORT)))
    deliver(router, order(0))  # starts the event loop, which can take longer than the deadline
    delivered = deliver(router, order(1), order(2))
    assert cancelled == ["1", "2"]
    assert isinstance(delivered.errors[0], DeadlineExceeded)
    assert "handler handle" in str(delivered.errors[0])


def test_an_async_handler_in_a_plain_decorator_is_cancelled_too(closing):
    async def never(order: Order) -> None:
        await asyncio.sleep(600)

    @wraps(never)
    def wrapper(order: Order) -> object:
        return never(order)

    router = closing(Router())
    router.use(Deadline(SHORT))
    router.event()(wrapper)
    assert isinstance(deliver(router, order()).errors[0], DeadlineExceeded)


def test_a_cancelled_handler_has_ended_before_its_transaction_is_rolled_back(closing):
    ends = []

    async def handle(order):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            store.add("after the end")  # would raise if the transaction had ended
            ends.append(order.id)

    chain, store = atomic(Deadline(SHORT))
    assert deliver(closing(async_router(handle, *chain)), order()).nacked
    assert ends == ["1"]
    assert store.get("after the end") is None


def test_an_async_handler_that_ends_in_time_is_left_alone(closing):
    async def handle(order):
        await asyncio.sleep(0)

    assert deliver(closing(async_router(handle, Deadline(60))), order()).acked


def test_a_timeout_of_the_handler_itself_is_its_own_error(closing):
    async def handle(order):
        raise TimeoutError("own")

    delivered = deliver(closing(async_router(handle, Deadline(60))), order())
    assert str(delivered.errors[0]) == "own"


def test_a_deadline_error_of_the_handler_itself_is_its_own(closing):
    async def handle(order):
        raise DeadlineExceeded("own")

    delivered = deliver(closing(async_router(handle, Deadline(60))), order())
    assert str(delivered.errors[0]) == "own"


# --- the interrupt itself -------------------------------------------------------------------


@pytest.fixture
def frequent_switches():
    """Lets threads take turns all the time, so that races are lost soon if they can be."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def call_of(seconds, *, fails):
    until = time.perf_counter() + seconds

    def spin():
        while time.perf_counter() < until:
            pass
        if fails:
            raise ValueError
        return "ended"

    return spin


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_an_interrupt_never_arrives_after_the_call(fails, nested):
    """Calls that end at about their limit: each is interrupted or it is not, and then over."""
    outcomes = set()
    for step in range(1_000):
        call = call_of(0.0002, fails=fails)
        if nested:
            call = partial(call_with_limit, 0.0001 + 0.00005 * (step % 5), call, KeyError)
        try:
            outcomes.add(call_with_limit(0.0001 + 0.00003 * (step % 7), call, TimeoutError))
        except (TimeoutError, ValueError, KeyError) as error:
            outcomes.add(type(error))
        for _ in range(20):  # where a late interrupt would hit
            pass
    assert outcomes  # and not Interrupt, which would have ended the test


def test_an_alarm_that_was_disarmed_does_not_fire():
    timer = Timer()
    alarm = Alarm(time.monotonic() + 3600)
    timer.arm(alarm)
    timer.disarm(alarm)
    assert not timer._armed
    assert not alarm.fired


def test_an_outer_limit_interrupts_an_inner_one():
    inner_late = []

    def inner():
        return call_with_limit(3600, never_ends, lambda: inner_late.append(1) or KeyError())

    with pytest.raises(TimeoutError):
        call_with_limit(SHORT, inner, TimeoutError)
    assert inner_late == []


def test_an_inner_limit_ends_alone():
    def outer():
        with pytest.raises(KeyError):
            call_with_limit(SHORT, never_ends, KeyError)
        return "goes on"

    assert call_with_limit(3600, outer, TimeoutError) == "goes on"


def test_a_later_alarm_does_not_delay_an_earlier_one():
    def outer():
        return call_with_limit(SHORT, never_ends, KeyError)

    with pytest.raises(KeyError):
        call_with_limit(3600, outer, TimeoutError)


def test_under_a_tracer_a_call_is_not_interrupted_but_found_late():
    steps = []
    sys.settrace(lambda *event: None)
    try:
        with pytest.raises(TimeoutError):
            call_with_limit(0.01, lambda: steps.append(time.sleep(0.02)), TimeoutError)
        assert call_with_limit(60, lambda: "in time", TimeoutError) == "in time"
    finally:
        sys.settrace(None)
    assert len(steps) == 1


def test_an_interrupt_is_no_exception():
    assert not issubclass(Interrupt, Exception)


def test_after_a_fork_there_is_a_fresh_timer():
    before = deadline._timer
    deadline._forget_timer()
    try:
        assert deadline._timer is not before
        with pytest.raises(TimeoutError):
            call_with_limit(SHORT, never_ends, TimeoutError)
    finally:
        deadline._timer = before
