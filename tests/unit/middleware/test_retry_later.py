"""`Retry(delays=…)`: a failed message leaves with the time of its next try, or for good."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.middleware.routers import order, router_of

from conquiet import App, Message, Tick, Worker
from conquiet.errors import (
    ConfigError,
    InvalidMessage,
    PermanentError,
    RetriesExhausted,
    StoreError,
    TryLater,
)
from conquiet.memory import Log
from conquiet.middleware import DeadLetter, Retry
from conquiet.testing import deliver


def failing(error: Exception) -> Any:
    def handle(message: Message[Any]) -> None:
        raise error

    return handle


def delivered(deliveries: int, handle: Any, *middlewares: Any) -> Any:
    message = order(1)
    message.deliveries = deliveries
    return deliver(router_of(handle, *middlewares), message)


def outcome(error: Exception, deliveries: int = 1, **options: Any) -> Any:
    retry = Retry(delays=[1, 60, 3_600], **options)
    return delivered(deliveries, failing(error), retry).errors[0]


@pytest.mark.parametrize(("deliveries", "seconds"), [(1, 1), (2, 60), (3, 3_600)])
def test_each_failure_has_its_delay(deliveries: int, seconds: int) -> None:
    cause = ValueError("no stock")
    error = outcome(cause, deliveries)
    assert isinstance(error, TryLater)
    assert (error.seconds, error.cause, str(error)) == (seconds, cause, "ValueError: no stock")


@pytest.mark.parametrize("deliveries", [4, 5, 99])
def test_after_the_last_delay_the_error_is_permanent(deliveries: int) -> None:
    given_up: list[int] = []
    error = outcome(
        ValueError("no stock"), deliveries, exhausted=lambda *about: given_up.append(about[2])
    )
    assert isinstance(error, RetriesExhausted)
    assert isinstance(error.__cause__, ValueError)
    assert str(error) == f"failed {deliveries} times, at last with ValueError: no stock"
    assert given_up == [4]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (PermanentError("no"), {}),
        (InvalidMessage("no"), {}),
        (StoreError("away"), {}),
        (KeyError("no"), {"never": KeyError}),
        (KeyError("no"), {"on": OSError}),
    ],
)
def test_what_a_retry_cannot_help_is_not_tried_later(
    error: Exception, options: dict[str, Any]
) -> None:
    assert outcome(error, **options) is error


def test_a_dead_letter_outside_waits_for_the_last_delay() -> None:
    letters = Log()
    for deliveries, dead in ((3, 0), (4, 1)):
        outside = DeadLetter(letters.sink(), max_attempts=2)
        found = delivered(deliveries, failing(ValueError("no")), outside, Retry(delays=[1, 2, 3]))
        assert len(found.acked) == dead
        assert len(letters) == dead


def test_retries_within_a_delivery_and_later_ones_go_together() -> None:
    calls: list[int] = []

    def handle(message: Message[Any]) -> None:
        calls.append(message.deliveries)
        raise ValueError("no")

    later, within = Retry(delays=[5]), Retry(3, first=0)
    for middlewares, expected in (((later, within), 3), ((within, later), 1)):
        calls.clear()
        assert isinstance(delivered(1, handle, *middlewares).errors[0], TryLater)
        assert len(calls) == expected


@pytest.mark.parametrize("delays", [[0], [-1], [float("inf")], [float("nan")], [1, 0]])
def test_wrong_delays_are_refused(delays: list[float]) -> None:
    with pytest.raises(ConfigError, match="is not a number of seconds"):
        Retry(delays=delays)


def test_a_source_that_cannot_keep_messages_is_refused_at_the_start() -> None:
    class Plain:
        def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
            raise AssertionError("it is refused before")

        def close(self) -> None: ...

    worker = Worker(Plain(), router_of(failing(ValueError()), Retry(delays=[1])))
    with pytest.raises(ConfigError, match="a Plain cannot keep a failed message for later"):
        worker.start()


def test_in_a_test_no_message_waits_for_its_time(tmp_path: Path) -> None:
    app = App("shop", f"sqlite:///{tmp_path}/shop.db")
    app.use(Retry(delays=[3_600] * 4))
    tries: list[int] = []

    @app.every(days=1)
    def job(message: Message[Any], tick: Tick) -> None:
        tries.append(message.deliveries)
        if tick.time.timestamp() == 0 or len(tries) < 3:
            raise ValueError("not yet")

    with app.test() as shop:
        shop.tick("job")
        assert tries == [1, 2, 3]
        assert shop.dead_letters == []
        tries.clear()
        shop.tick("job", datetime.fromtimestamp(0, UTC))
        assert tries == [1, 2, 3, 4, 5]
        [letter] = shop.dead_letters
        assert letter.error == "failed 5 times, at last with ValueError: not yet"
