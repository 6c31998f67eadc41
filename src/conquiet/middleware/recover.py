"""Turn exceptions of the chain into errors of its messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from conquiet.errors import HandlerError
from conquiet.handler import Process, Result
from conquiet.message import Message, describe

logger = logging.getLogger("conquiet.middleware")

Hook: TypeAlias = Callable[[Sequence[Message[Any]], BaseException], object]


class Recover:
    """Catches exceptions of the chain, and calls a hook with them.

    An exception that would end the process, such as `SystemExit`, becomes a `HandlerError` with
    the exception as its cause. `KeyboardInterrupt` is raised again: it is meant for the process.
    The hook gets the batch and the exception, with its traceback.
    """

    def __init__(self, hook: Hook | None = None) -> None:
        self._hook = hook

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            try:
                return next(batch)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - the purpose of this middleware
                self._call_hook(batch, error)
                return [_as_exception(error, batch)] * len(batch)

        return process

    def _call_hook(self, batch: Sequence[Message[Any]], error: BaseException) -> None:
        if self._hook is None:
            return
        try:
            self._hook(batch, error)
        except Exception:
            logger.exception("the hook of Recover failed")


def _as_exception(error: BaseException, batch: Sequence[Message[Any]]) -> Exception:
    if isinstance(error, Exception):
        return error
    first = describe(batch[0].attributes) if batch else "an empty batch"
    wrapped = HandlerError(f"the chain tried to end the process ({error!r:.100}) on {first}")
    wrapped.__cause__ = error
    return wrapped
