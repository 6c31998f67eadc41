"""Transaction over a redis-py client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import redis

from conquiet import transaction
from conquiet.errors import StoreError
from conquiet.handler import AROUND, Process, Result
from conquiet.message import Message
from conquiet.redis.ambient import UNITS, Unit, find
from conquiet.redis.commands import Commands
from conquiet.redis.home import Home
from conquiet.redis.outcome import Fenced, PartlyApplied, UnknownOutcome, with_held
from conquiet.redis.wire import is_unwilling


class Transaction(transaction.Transaction):
    """Middleware: what a batch writes goes to Redis in one MULTI … EXEC, or not at all.

    Adapters queue by `conquiet.redis.commands(client)`. Inside another transaction on the same
    database it is a part of it, and undone alone if it fails. One connection of the pool is in
    use from the inbox to EXEC; reads of handlers need another.

    EXEC is no rollback: see `PartialExecError`.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._home = Home(client)

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        outer = find(self.client)
        return self._whole(batch) if outer is None else outer.savepoint()

    def _commit(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        held: dict[int, Exception] = {}

        def run(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            held.clear()  # of a try before
            unit = find(self.client)
            if unit is not None:
                held.update(unit.held)
            return results

        try:
            results = self._tried(run, batch)
        except PartlyApplied as partly:
            results = partly.results(batch)
        except UnknownOutcome as error:
            # To run it again now might repeat it; the inbox will know at the next delivery.
            return [error] * len(batch)
        return with_held(results, batch, held)

    def _tried(self, run: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run again what was fenced, if it is a single message; several go one by one."""
        for _ in range(self.store_tries - 1 if len(batch) == 1 else 0):
            try:
                return super()._commit(run, batch)
            except Fenced:
                pass
        return super()._commit(run, batch)

    @contextmanager
    def _whole(self, batch: Sequence[Message[Any]]) -> Iterator[Commands]:
        unit = Unit(self._home)
        entered = UNITS.set((*UNITS.get(), unit))
        around = AROUND.set((*AROUND.get(), unit.note)) if len(batch) > 1 else None
        try:
            yield Commands(unit, self.client)
            unit.commit()
        except Exception as error:
            unit.discard()
            if _is_trouble(error):
                raise StoreError(f"Redis failed inside the transaction: {error}") from error
            raise
        except BaseException:
            unit.discard()
            raise
        finally:
            if around is not None:
                AROUND.reset(around)
            UNITS.reset(entered)
            unit.close()


def _is_trouble(error: Exception) -> bool:
    """What a handler's own read may have met: no fault of its message."""
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return True
    return isinstance(error, redis.ResponseError) and is_unwilling(error)
