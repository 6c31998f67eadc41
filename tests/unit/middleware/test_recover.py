"""Whatever the chain raises becomes the error of its messages."""

from __future__ import annotations

import traceback

import pytest
from tests.unit.middleware.routers import atomic, nothing, order, router_of

from conquiet.errors import HandlerError
from conquiet.middleware import Recover
from conquiet.testing import deliver


def raising(error):
    def breaks(batch):
        raise error

    return breaks


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), MemoryError()])
def test_an_exception_becomes_the_error_of_each_message(error):
    assert Recover()(raising(error))([order(1), order(2)]) == [error, error]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_what_would_end_the_process_is_wrapped_and_kept_as_the_cause(error):
    [result] = Recover()(raising(error))([order()])
    assert isinstance(result, HandlerError)
    assert result.__cause__ is error


def test_the_traceback_shows_where_it_was_raised():
    [result] = Recover()(raising(ValueError("x")))([order()])
    assert "in breaks" in "".join(traceback.format_exception(result))


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt):
        Recover()(raising(KeyboardInterrupt()))([order()])


def test_the_hook_gets_the_batch_and_the_error():
    seen = []
    batch = [order(1), order(2)]
    error = ValueError("x")
    Recover(lambda *arguments: seen.append(arguments))(raising(error))(batch)
    assert seen == [(batch, error)]


def test_a_hook_that_fails_is_logged_and_changes_nothing(caplog):
    error = ValueError("x")
    assert Recover(lambda *_: 1 / 0)(raising(error))([order()]) == [error]
    assert "hook of Recover failed" in caplog.text


def test_in_a_router_a_broken_middleware_nacks_and_the_next_batch_is_fine():
    broken = [True]

    def breaks_once(next):
        def process(batch):
            if broken.pop() if broken else False:
                raise SystemExit
            return next(batch)

        return process

    router = router_of(nothing, Recover(), breaks_once)
    assert deliver(router, order(1), order(2)).nacked
    assert len(deliver(router, order(1), order(2)).acked) == 2


def test_inside_a_transaction_it_still_rolls_back():
    def handle(message):
        store.put("seen", message.id)
        raise ValueError

    chain, store = atomic(Recover())
    assert deliver(router_of(handle, *chain), order()).nacked
    assert store.get("seen") is None
