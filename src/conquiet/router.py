"""Route messages to handlers through a chain of middlewares.

    acking → middlewares, first registered outermost → [gate] → … → handler

The gate is just outside the transaction.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from conquiet.acking import Acking, Error, settle_after_commit
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    GivenBack,
    HandlerError,
    PermanentError,
    note_handler,
)
from conquiet.gate import FailedKeys, Gate, Judge, Unknown
from conquiet.handler import NOTHING, SKIPPED, Handler, Kind, LoopThread, Outputs, Process, Result
from conquiet.matcher import Matcher
from conquiet.message import Message, describe, printable
from conquiet.stage import Middleware, Stage, check_order, insert, stage_of
from conquiet.transaction import ATOMIC

logger = logging.getLogger("conquiet.router")

AckStrategy = Literal["on_success", "manual", "forward"]
F = TypeVar("F", bound=Callable[..., Any])
Batch = Sequence[Message[Any]]

MAX_DATA_BYTES = 16 * 1024 * 1024
_MAX_CACHED_TYPES = 10_000


@dataclass(slots=True)
class Handled:
    """Holds a batch that has run through the chain and is not settled yet.

    A message for several handlers is in it once per handler, each with a share of its acking.
    """

    messages: Batch
    results: Sequence[Result]

    @property
    def outputs(self) -> list[Message[Any]]:
        return [
            out for result in self.results if not isinstance(result, Exception) for out in result
        ]


class Router:
    """Routes messages to handlers through a chain of middlewares.

    >>> import msgspec
    >>> class Greet(msgspec.Struct):
    ...     name: str
    >>> router = Router()
    >>> @router.event()
    ... def greet(greeting: Greet) -> None:
    ...     print("hello", greeting.name)
    >>> [result] = router.process([Message(b'{"name": "Ada"}', {"type": "greet", "id": "1"})])
    hello Ada

    `ack` chooses when a message is acked: `on_success`, when its handlers and the commit
    succeeded; `forward`, when all its outputs are acked; `manual`, by the handler. A failed message
    is always nacked.

    `unknown` is for messages that no handler takes: `nack`, so that they are delivered again, since
    the next release may know them; `dead`, a dead letter at once; `ack`, to pass them over on a
    stream that other services share; or a function of the message that returns one of these. A
    `fallback` handles them instead.

    Data of more than `max_data_bytes` is refused as an `InvalidMessage`.
    """

    def __init__(
        self,
        *,
        ack: AckStrategy = "on_success",
        unknown: Unknown | Judge = "nack",
        max_data_bytes: int = MAX_DATA_BYTES,
    ) -> None:
        if ack not in get_args(AckStrategy):
            raise ConfigError(f"ack={ack!r}: choose one of {', '.join(get_args(AckStrategy))}")
        if not callable(unknown) and unknown not in get_args(Unknown):
            raise ConfigError(f"unknown={unknown!r}: choose one of {', '.join(get_args(Unknown))}")
        if max_data_bytes < 1:
            raise ConfigError(f"max_data_bytes={max_data_bytes}: must be at least 1")
        self.ack: AckStrategy = ack
        self.unknown: Unknown | Judge = unknown
        self.max_data_bytes = max_data_bytes
        self.loop = LoopThread()
        self._handlers: list[Handler] = []
        self._fallbacks: list[Handler] = []
        self._middlewares: list[Middleware] = []
        self._routes: dict[str, list[Handler]] = {}
        self._only: dict[str, Handler] = {}
        """The handlers of types that have one, without a matcher."""
        self._derives_ids = True
        self._chain: Process | None = None
        self._lock = threading.Lock()

    def use(self, *middlewares: Middleware) -> None:
        """Add middlewares; the first one is the outermost."""
        self._refuse_when_started()
        for item in middlewares:
            _check_callable(item)
        self._middlewares.extend(middlewares)

    def insert(self, middleware: Middleware) -> None:
        """Add a middleware at the place of its stage; one without a stage outside the others.

        Of several without a stage, the first one is the outermost.
        """
        self._refuse_when_started()
        _check_callable(middleware)
        if stage_of(middleware) is not None:
            self._middlewares = insert(self._middlewares, middleware)
            return
        staged = (at for at, item in enumerate(self._middlewares) if stage_of(item) is not None)
        self._middlewares.insert(next(staged, len(self._middlewares)), middleware)

    def command(
        self,
        *,
        source: str,
        type: str | None = None,
        name: str | None = None,
        match: Matcher | None = None,
    ) -> Callable[[F], F]:
        """Register a handler that returns events; `source` is the source of each.

        `type` is that of the messages it takes, by default that of its parameter's class; `match`
        picks among them. `name` identifies it in the inbox, by default the function's.
        """
        if not source:
            raise ConfigError("a command handler needs the source of its events: source='/orders'")

        def register(function: F) -> F:
            self.add(
                Handler(function, Kind.COMMAND, source=source, type=type, name=name, match=match)
            )
            return function

        return register

    def event(
        self, *, type: str | None = None, name: str | None = None, match: Matcher | None = None
    ) -> Callable[[F], F]:
        """Register a handler that returns nothing; `type`, `name` and `match` as for `command`."""

        def register(function: F) -> F:
            self.add(Handler(function, Kind.EVENT, type=type, name=name, match=match))
            return function

        return register

    def raw(
        self,
        *,
        type: str | None = None,
        match: Matcher | None = None,
        name: str | None = None,
        source: str = "",
    ) -> Callable[[F], F]:
        """Register a handler of whole messages; without type or match it takes them all.

        It runs beside the other handlers of a message; see `fallback` for one that does not.
        `source` is that of the messages it returns, if they name none.
        """

        def register(function: F) -> F:
            self.add(Handler(function, Kind.RAW, source=source, type=type, name=name, match=match))
            return function

        return register

    def fallback(self, *, name: str | None = None, source: str = "") -> Callable[[F], F]:
        """Register a handler of whole messages; it takes those that no other handler takes.

        `source` is that of the messages it returns, if they name none.
        """

        def register(function: F) -> F:
            if self._fallbacks:
                raise ConfigError(f"a router has one fallback, and it is {self._fallbacks[0].name}")
            self._add(Handler(function, Kind.RAW, source=source, name=name), self._fallbacks)
            return function

        return register

    def add(self, handler: Handler) -> None:
        """Add a handler that was created by hand."""
        self._add(handler, self._handlers)

    def _add(self, handler: Handler, handlers: list[Handler]) -> None:
        self._refuse_when_started()
        if any(handler.name == other.name for other in self.handlers):
            raise ConfigError(
                f"two handlers are called {handler.name}; the inbox distinguishes them by name:"
                " give one of them name='…'"
            )
        handlers.append(handler)

    def _refuse_when_started(self) -> None:
        if self._chain is not None:
            raise ConfigError("the router has started: register handlers and middlewares before")

    @property
    def handlers(self) -> Sequence[Handler]:
        return (*self._handlers, *self._fallbacks)

    @property
    def middlewares(self) -> Sequence[Middleware]:
        return tuple(self._middlewares)

    def copy(self, *middlewares: Middleware) -> Router:
        """Return a router with the same handlers and settings, and with these middlewares."""
        twin = Router(ack=self.ack, unknown=self.unknown, max_data_bytes=self.max_data_bytes)
        twin.use(*middlewares)
        twin._handlers.extend(self._handlers)
        twin._fallbacks.extend(self._fallbacks)
        return twin

    @property
    def stages(self) -> frozenset[Stage]:
        """Return the stages of the router's middlewares."""
        stages = map(stage_of, self._middlewares)
        return frozenset(stage for stage in stages if stage is not None)

    @property
    def blocks(self) -> bool:
        """Return whether a middleware blocks its thread while it waits, as for a database."""
        return any(getattr(item, "blocks", False) for item in self._middlewares)

    @property
    def is_async(self) -> bool:
        """Return whether a middleware has an async client, and needs an async worker."""
        return any(getattr(item, "is_async", False) for item in self._middlewares)

    @property
    def capacity(self) -> int | None:
        """Return how many batches can run at once, as by the connections of a pool."""
        limits = [getattr(item, "capacity", None) for item in self._middlewares]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def pool(self) -> object:
        """Return the pool that the transaction takes its connections from, if it has one."""
        transactions = (item for item in self._middlewares if stage_of(item) is Stage.TRANSACTION)
        return getattr(next(transactions, None), "pool", None)

    def start(self, publish: Middleware | None = None, inbox: Middleware | None = None) -> Process:
        """Check and build the chain; called by a worker, or for the first message.

        `publish` is the middleware by which a worker publishes outputs, `inbox` that of its source,
        if the source keeps a position in the transaction of the effects.
        """
        middlewares = self._middlewares if inbox is None else insert(self._middlewares, inbox)
        if self._chain is None or inbox is not None:
            self._check(middlewares)  # not under the lock: it may look into a database
        with self._lock:
            if self._chain is None:
                # An outbox stores each output once, and its rows sort by new ids.
                self._derives_ids = Stage.OUTBOX not in self.stages
                self._chain = self._build(self._middlewares)
            if publish is None:
                return self._chain
            return self._build(insert(middlewares, publish))

    def process(self, batch: Batch) -> Sequence[Result]:
        """Run a batch and settle it: commit first, then ack."""
        if ATOMIC.get() and any(message.acking is not None for message in batch):
            raise HandlerError(
                f"{describe(batch[0].attributes)}: inside a transaction a router would ack before"
                " the commit; let the outer router settle it, or use run() and settle() after it"
            )
        handled = self.run(batch)
        self.settle(handled)
        return handled.results

    def run(self, batch: Batch, chain: Process | None = None) -> Handled:
        """Run a batch through the chain, or through one of `start`, without settling it."""
        chain = chain or self._chain or self.start()
        messages = self._assign(batch)
        try:
            results = chain(messages)
            if len(results) != len(messages):
                raise HandlerError(
                    f"a middleware returned {len(results)} results for {len(messages)} messages;"
                    " it must return one per message, in order"
                )
        except Exception as error:  # noqa: BLE001 - a broken middleware must not end the worker
            results = [error] * len(messages)
        if self.ack == "forward":
            _share_with_outputs(messages, results)
        return Handled(messages, results)

    def settle(self, handled: Handled) -> None:
        """Ack successful messages and nack failed ones, in one call per source.

        `handled` is what `run` returned.
        """
        acked: list[Acking] = []
        nacked: list[tuple[Acking, Error]] = []
        acks_all = self.ack == "on_success"
        returning: dict[int, Exception] | None = None
        messages, results = handled.messages, handled.results
        if acks_all and results.count(NOTHING) == len(results):
            acked = [message.acking for message in messages if message.acking is not None]
            messages = ()
        for message, result in zip(messages, results, strict=False):
            if isinstance(result, Exception):
                _log_failure(message, result)
                if returning is None:
                    returning = _returning_errors(handled)
                if message.acking is not None:
                    error = returning.get(id(message.origin), result)
                    if message.handler is not None:
                        note_handler(error, message.handler.name)
                    nacked.append((message.acking, error))
            elif message.acking is not None and (acks_all or self._acks(result)):
                acked.append(message.acking)
        try:
            settle_after_commit(acked, nacked)
        except Exception:
            # The effects are committed; the source redelivers, and the inbox skips duplicates.
            logger.exception("could not settle messages; they will be delivered again")

    def _acks(self, outputs: Outputs) -> bool:
        return outputs is SKIPPED if self.ack == "manual" else not outputs

    def close(self) -> None:
        """End the event loop of async handlers; the last worker does so when it stops."""
        self.loop.close()

    def _check(self, middlewares: Sequence[Middleware]) -> None:
        check_order(middlewares)
        if not self.handlers:
            raise ConfigError(
                "the router has no handlers, so that every message would fail; register one, as by"
                " @router.event(), or import the module that does"
            )
        stages = set(map(stage_of, middlewares))
        if stages & {Stage.INBOX, Stage.CLAIM} and Stage.OUTBOX not in stages:
            for handler in self.handlers:
                if handler.declares_outputs:
                    raise ConfigError(
                        f"handler {handler.name} returns events, but the chain has an inbox and no"
                        " outbox: after a crash they would never be sent. Use this order:"
                        " router.use(Transaction, Inbox, Outbox)"
                    )
        for item in reversed(middlewares):  # a transaction asks its database, the last of all
            check = getattr(item, "check_chain", None)
            if check is not None:
                check(middlewares)

    def _build(self, middlewares: Sequence[Middleware]) -> Process:
        chain: Process = self._handle
        inner = [
            index
            for index, item in enumerate(middlewares)
            if (stage_of(item) or 0) >= Stage.TRANSACTION
        ]
        gate_at = inner[0] if inner else len(middlewares)
        for item in reversed(middlewares[gate_at:]):
            chain = item(chain)
        admissions = [item.admit for item in middlewares if hasattr(item, "admit")]
        gate = Gate(self._handlers, self.max_data_bytes, self.unknown, admissions)
        chain = gate(chain)
        for item in reversed(middlewares[:gate_at]):
            chain = item(chain)
        return chain

    def _assign(self, batch: Batch) -> Batch:
        """Assign a handler to each message; copy a message that several handlers take."""
        expanded: list[Message[Any]] = []
        only = self._only
        for message in batch:
            kind = message.attributes.get("type")
            if type(kind) is str and kind in only:
                message.handler = only[kind]
                expanded.append(message)
                continue
            handlers = self._candidates(message)
            if len(handlers) == 1:
                message.handler = handlers[0]
                expanded.append(message)
            elif not handlers:
                message.handler = None
                expanded.append(message)
            else:
                for handler, share in zip(handlers, message.shares(len(handlers)), strict=True):
                    share.handler = handler
                    expanded.append(share)
        return expanded

    def _candidates(self, message: Message[Any]) -> list[Handler]:
        kind = message.attributes.get("type")
        if type(kind) is not str or not kind:
            return []
        handlers = self._routes.get(kind)
        if handlers is None:
            handlers = [item for item in self._handlers if item.type in (None, kind)]
            if len(self._routes) < _MAX_CACHED_TYPES:  # types come from outside: limit their number
                self._routes[kind] = handlers
                if len(handlers) == 1 and handlers[0].match is None:
                    self._only[kind] = handlers[0]
        for handler in handlers:
            if handler.match is not None:
                handlers = [item for item in handlers if _matches(item, message)]
                break
        return handlers or self._fallbacks

    def _handle(self, batch: Batch) -> Sequence[Result]:
        """Run each message's handler, in order: the innermost step of the chain."""
        atomic = ATOMIC.get()
        failed_keys = FailedKeys()
        results: list[Result] = []
        start = 0
        while start < len(batch):
            message = batch[start]
            handler = message.handler
            assert handler is not None, "the gate admits only messages with a handler"
            if message.order_key is not None:
                blocked = failed_keys.blocking_error(message)
                if blocked is not None:
                    results.append(blocked)
                    start += 1
                    continue
            end = _run_end(batch, start, failed_keys) if handler.is_batch else start + 1
            try:
                results.extend(
                    handler.run(batch[start:end], self.loop.run, derives_ids=self._derives_ids)
                )
            except Exception as error:
                if atomic:
                    raise
                if end - start > 1 and not isinstance(error, Blameless):
                    results.extend(self._handle_each(batch[start:end], failed_keys))
                else:
                    results.extend([error] * (end - start))
                    for failed in batch[start:end]:
                        failed_keys.add(failed)
            start = end
        return results

    def _handle_each(self, batch: Batch, failed_keys: FailedKeys) -> Sequence[Result]:
        """Run the messages of a failed batch handler one by one, which shows whose error it is."""
        results: list[Result] = []
        for message in batch:
            result = failed_keys.blocking_error(message) or self._handle((message,))[0]
            if isinstance(result, Exception):
                failed_keys.add(message)
            results.append(result)
        return results


def _check_callable(middleware: Middleware) -> None:
    if not callable(middleware):
        raise ConfigError(f"{middleware!r} is not a middleware: it cannot be called")


def _matches(handler: Handler, message: Message[Any]) -> bool:
    if handler.match is None:
        return True
    try:
        return handler.match(message)
    except Exception:  # a failing matcher refuses its message; the batch goes on
        logger.exception("the matcher of %s failed", handler.name)
        return False


def _run_end(batch: Batch, start: int, failed_keys: FailedKeys) -> int:
    """Return the end of the messages that a batch handler takes in one call."""
    end = start + 1
    handler = batch[start].handler
    while (
        end < len(batch)
        and batch[end].handler is handler
        and (batch[end].order_key is None or failed_keys.blocking_error(batch[end]) is None)
    ):
        end += 1
    return end


def _share_with_outputs(messages: Batch, results: Sequence[Result]) -> None:
    """Share the acking of an input among its outputs, for `forward`."""
    for message, result in zip(messages, results, strict=True):
        if isinstance(result, Exception) or not result or message.acking is None:
            continue
        for output, share in zip(result, message.acking.split(len(result)), strict=True):
            output.acking = share


def _returning_errors(handled: Handled) -> dict[int, Exception]:
    """Return the errors to nack messages of several handlers with, by the identity of the origin.

    A source buries a message after a permanent error, for all its handlers: it must hear of it only
    if none of those that failed can be retried.
    """
    found: dict[int, Exception] = {}
    for message, result in zip(handled.messages, handled.results, strict=True):
        if message.origin is not message and isinstance(result, Exception):
            former = found.setdefault(id(message.origin), result)
            if _finality(result) < _finality(former):
                found[id(message.origin)] = result
    return found


def _finality(error: Exception) -> int:
    """Order errors by what a source does: deliver again at no cost, count an attempt, bury."""
    if isinstance(error, Blameless):
        return 0
    return 2 if isinstance(error, PermanentError) else 1


def _log_failure(message: Message[Any], error: Exception) -> None:
    handler = message.handler.name if message.handler is not None else "-"
    known = isinstance(error, ConquietError)  # its text names the message
    logger.log(
        logging.DEBUG if isinstance(error, GivenBack) else logging.WARNING,
        "nack handler=%s delivery=%d: %s",
        handler,
        message.deliveries,
        printable(str(error)) if known else f"{describe(message.attributes)}: {error!r}",
        exc_info=None if known else error,
        extra={
            "event_id": message.attributes.get("id", ""),
            "event_type": message.attributes.get("type", ""),
            "handler": handler,
            "attempt": message.deliveries,
            "reason": type(error).__name__,
            "is_told": True,
        },
    )
