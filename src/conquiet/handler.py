"""Wrap plain functions with type hints as handlers that a router can run.

A handler knows no transaction and no broker. The hint of its first parameter is the type that the
router decodes a message's data into. The outputs of a command handler become events. In an async
worker `async def` handlers run on its event loop, and others in threads; in a worker of threads,
`async def` handlers run on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from enum import Enum
from functools import partial
from types import AsyncGeneratorType, FrameType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from conquiet import bridge
from conquiet.codec import Decode, decoder
from conquiet.errors import ConfigError, DeadlineExceeded, HandlerError, Interrupt, StoreError
from conquiet.event import complete, derived_id, is_event_class, new_attributes, type_name
from conquiet.matcher import Matcher
from conquiet.message import Message, describe, now_text
from conquiet.task import is_signature

T = TypeVar("T")

Outputs: TypeAlias = Sequence[Message[Any]]
"""The outputs of one message; often none."""

Result: TypeAlias = Outputs | Exception
"""The outputs of one message, or its error."""

Process: TypeAlias = Callable[[Sequence[Message[Any]]], Sequence[Result]]
"""Takes a batch and returns one result per message, in order. An exception fails them all."""

RunAsync: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]

Around: TypeAlias = Callable[[Sequence[Message[Any]], Callable[[], Sequence[Result]]], Any]
"""Wraps one call of a handler: takes the call's messages and makes the call."""

AROUND: ContextVar[tuple[Around, ...]] = ContextVar("conquiet.around", default=())
"""Set by middlewares while their batch runs, outermost first: wrappers of single calls, such as a
time limit, a span or a timer. A middleware itself sees batches."""

NOTHING: Outputs = ()


class _Skipped(tuple[Message[Any], ...]):
    """Marks a message without outputs because no handler ran."""


SKIPPED: Outputs = _Skipped()
"""The result of a duplicate: it is acked with any ack strategy, since its handler does not run and
cannot ack it."""


class Kind(Enum):
    """Declares what a handler may return: events, nothing, or messages."""

    COMMAND = "command"
    EVENT = "event"
    RAW = "raw"


class Handler:
    """Runs a function for the messages that it takes."""

    def __init__(
        self,
        function: Callable[..., Any],
        kind: Kind,
        *,
        source: str = "",
        type: str | None = None,
        name: str | None = None,
        match: Matcher | None = None,
    ) -> None:
        self.function = function
        self.kind = kind
        self.source = source
        self.name = name or function_name(function)
        # With the module: handlers of two routers may have one name, and must not share ids.
        module = getattr(_unwrap(function), "__module__", "")
        self._producer = f"{module}:{self.name}"
        self.match = match
        hints = type_hints(function, f"handler {self.name}")
        self.takes, self.is_batch = _input(function, hints, self.name)
        self._wants_message = _wants_message(function, self.name)
        # A guess until the first call: a plain decorator may return the coroutine of the function
        # that it wraps, or its result.
        called = inspect.unwrap(_unwrap(function))
        self.is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
        self.decode = _decode_for(kind, self.takes, self.name)
        """Decodes a message's data for this handler; raises `InvalidMessage` if it is wrong."""
        self.type = type or self._type_from_class()
        self.emits = _emitted_types(hints.get("return"), kind, self.name)
        """The classes in the return hint."""
        self._event_types: dict[Any, str] = {}

    @property
    def declares_outputs(self) -> bool:
        """Return whether the return hint declares outputs."""
        return bool(self.emits)

    def run(
        self,
        messages: Sequence[Message[Any]],
        run_async: RunAsync,
        *,
        derives_ids: bool = False,
    ) -> Sequence[Result]:
        """Run a batch handler with all messages, any other with the first.

        With `derives_ids`, the ids of outputs follow from the input, this handler and their place.
        """
        if not self.is_async and bridge.is_on_loop():
            # In a thread: the call, and what middlewares put around it.
            return bridge.call(self._run, messages, run_async, derives_ids)
        if AROUND.get():
            return self._run(messages, run_async, derives_ids)
        return self._call(messages, run_async, derives_ids)

    def _run(
        self, messages: Sequence[Message[Any]], run_async: RunAsync, derives_ids: bool
    ) -> Sequence[Result]:
        around = AROUND.get()
        call: Callable[[], Sequence[Result]] = partial(self._call, messages, run_async, derives_ids)
        for outer in reversed(around):
            call = partial(outer, messages, call)
        token = AROUND.set(())  # a router inside the handler sets its own
        try:
            return call()
        finally:
            AROUND.reset(token)

    def _call(
        self, messages: Sequence[Message[Any]], run_async: RunAsync, derives_ids: bool
    ) -> Sequence[Result]:
        try:
            return self._results(messages, run_async, derives_ids)
        except StoreError as error:
            # Of a store that the handler opened: no reason to give all other messages back.
            error.is_outage = False
            raise
        except (Exception, Interrupt):
            raise
        except BaseException as error:
            # Python raises Ctrl-C in the main thread; elsewhere the handler raised it.
            if isinstance(error, KeyboardInterrupt) and _is_main_thread():
                raise
            if isinstance(error, asyncio.CancelledError) and bridge.is_cancelled():
                raise
            raise HandlerError(
                f"handler {self.name} tried to end the process ({error!r:.100})"
                f" on {describe(messages[0].attributes)}"
            ) from error

    def _results(
        self, messages: Sequence[Message[Any]], run_async: RunAsync, derives_ids: bool
    ) -> Sequence[Result]:
        if not self.is_batch and not self._wants_message:
            returned = self.function(messages[0].decoded)
        else:
            values = [message.decoded for message in messages]
            arguments: list[Any] = [values if self.is_batch else values[0]]
            if self._wants_message:
                arguments.append(list(messages) if self.is_batch else messages[0])
            returned = self.function(*arguments)
        if returned is not None or self.is_async:
            if isinstance(returned, AsyncGeneratorType):
                returned = _collect(returned)
            self.is_async = isinstance(returned, Coroutine)
            if self.is_async:
                returned = run_async(returned)
        if returned is None:
            return [NOTHING] * len(messages)
        if not self.is_batch:
            return [self._outputs(returned, messages[0], derives_ids, now_text())]
        return self._outputs_of_batch(returned, messages, derives_ids)

    def _outputs_of_batch(
        self, returned: Any, messages: Sequence[Message[Any]], derives_ids: bool
    ) -> Sequence[Result]:
        if not isinstance(returned, (list, tuple)) or len(returned) != len(messages):
            got = f"{len(returned)} items" if hasattr(returned, "__len__") else repr(returned)
            raise HandlerError(
                f"batch handler {self.name} got {len(messages)} messages, the first of them"
                f" {describe(messages[0].attributes)}, and returned {got[:100]};"
                " return one item per message, in order: an event, a list of events or None"
            )
        now = now_text()
        return [
            NOTHING if part is None else self._outputs(part, message, derives_ids, now)
            for part, message in zip(returned, messages, strict=True)
        ]

    def _outputs(
        self, returned: Any, message: Message[Any], derives_ids: bool, now: str
    ) -> Outputs:
        if self.kind is Kind.EVENT:
            raise HandlerError(
                f"event handler {self.name} returned {type(returned).__name__} for"
                f" {describe(message.attributes)}; only command handlers return events:"
                " use @router.command(source=…)"
            )
        kind = type(returned)
        if kind is list or kind is tuple:
            items: Iterable[Any] = returned
        elif kind in self._event_types:  # known since an earlier output
            if not derives_ids:
                name = self._event_types[kind]
                return [Message(returned, new_attributes(name, self.source, None, now))]
            items = (returned,)
        else:
            many = isinstance(returned, Iterable) and not isinstance(
                returned, (msgspec.Struct, dict, str, bytes, Message)
            )
            items = returned if many and not is_event_class(type(returned)) else (returned,)
        if not derives_ids:
            return [self._output(item, message, None, now) for item in items]
        return [
            self._output(item, message, derived_id(message, self._producer, place), now)
            for place, item in enumerate(items)
        ]

    def _output(self, item: Any, message: Message[Any], id: str | None, now: str) -> Message[Any]:
        if isinstance(item, Message):
            return self._complete(item, message, id)
        if self.kind is Kind.RAW:
            raise self._wrong(item, message, "a raw handler returns Message objects")
        kind = type(item)
        name = self._event_types.get(kind)
        if name is None:
            if is_signature(item):
                return self._complete(Message(item), message, id)
            name = self._event_types[kind] = self._event_type(item, message)
        return Message(item, new_attributes(name, self.source, id, now))

    def _event_type(self, item: Any, message: Message[Any]) -> str:
        if is_event_class(type(item)):
            return type_name(type(item))
        if isinstance(item, dict) and len(self.emits) == 1 and is_typeddict(self.emits[0]):
            return type_name(self.emits[0])
        raise self._wrong(
            item,
            message,
            "an event is a msgspec Struct, a dataclass, a pydantic model, a Message, or a dict"
            " where the return hint names one TypedDict",
        )

    def _wrong(self, item: Any, message: Message[Any], rule: str) -> HandlerError:
        return HandlerError(
            f"handler {self.name} returned {type(item).__name__} ({item!r:.80})"
            f" for {describe(message.attributes)}; {rule}"
        )

    def _complete(self, given: Message[Any], message: Message[Any], id: str | None) -> Message[Any]:
        """Copy an output and add missing attributes; those set by the handler are kept.

        Always a copy: an input keeps its acking and its topic, and an object that is returned
        several times becomes several events, each with its own id.
        """
        output = complete(given, self.source, id)
        if not output.attributes["type"]:
            raise self._wrong(
                given, message, "it needs a type: set attributes['type'], or give it an event"
            )
        if given.handler is not None:  # an input, whose topic is not that of the output
            output.topic = None
        return output

    def _type_from_class(self) -> str | None:
        if self.kind is Kind.RAW:
            return None
        if _is_plain(self.takes):
            if self.match is not None:
                return None
            raise ConfigError(
                f"handler {self.name} takes {self.takes!r}, which does not name a message type;"
                " add type='…' or match=types('…')"
            )
        return type_name(self.takes)

    def __repr__(self) -> str:
        return f"<Handler {self.name} for {self.type or 'what it matches'}>"


async def _collect(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_plain(kind: Any) -> bool:
    return kind in (dict, bytes) or get_origin(kind) is dict


def _unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a partial or a callable object."""
    while hasattr(function, "func") and not inspect.isroutine(function):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        return type(function).__call__
    return function


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, also of one behind a partial or a callable object."""
    called = function
    while hasattr(called, "func") and not inspect.isroutine(called):
        called = called.func
    return getattr(called, "__name__", None) or type(called).__name__


def type_hints(
    function: Callable[..., Any], name: str, *, include_extras: bool = False
) -> dict[str, Any]:
    """Resolve the type hints of a function; `name` is for the error if one cannot be resolved."""
    target = _unwrap(function)
    if inspect.isclass(target):
        target = target.__init__
    try:
        return get_type_hints(target, include_extras=include_extras)
    except NameError:
        pass
    # A class defined inside a function is visible only where the handler is registered: search
    # the frames of the callers. Our own frames have names that mean something else.
    frame: FrameType | None = sys._getframe(1)
    missing: NameError | None = None
    while frame is not None:
        is_ours = frame.f_globals.get("__name__", "").startswith("conquiet.")
        try:
            return get_type_hints(target, None, {} if is_ours else frame.f_locals, include_extras)
        except NameError as error:
            missing = error
        frame = frame.f_back
    raise ConfigError(f"the type hints of {name} cannot be resolved: {missing}")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _input(function: Callable[..., Any], hints: dict[str, Any], name: str) -> tuple[Any, bool]:
    """Return the type that the handler takes, and whether it takes a list of it."""
    parameters = _parameters(function)
    if not parameters or parameters[0].name not in hints:
        raise ConfigError(
            f"handler {name} needs a hint of its parameter, as in: def {name}(order: PlaceOrder)"
        )
    hint = hints[parameters[0].name]
    if get_origin(hint) in (list, Sequence) and get_args(hint):
        return get_args(hint)[0], True
    return hint, False


def _wants_message(function: Callable[..., Any], name: str) -> bool:
    required = [p for p in _parameters(function) if p.default is p.empty]
    if len(required) > 2:
        raise ConfigError(
            f"handler {name} takes {len(required)} arguments; it gets the data and, if it has"
            " a second parameter, the message. Bind others with functools.partial"
        )
    return len(required) == 2


def _decode_for(kind: Kind, takes: Any, name: str) -> Decode:
    is_message = (get_origin(takes) or takes) is Message
    if is_message != (kind is Kind.RAW):
        raise ConfigError(
            f"handler {name} takes {takes!r}: raw handlers take Message, the others take data"
        )
    if kind is Kind.RAW:
        return lambda message: message
    return decoder(takes)


def _emitted_types(hint: Any, kind: Kind, name: str) -> list[type]:
    """Return the classes in the return hint; empty if it has none."""
    found: list[type] = []
    pending = [hint]
    while pending:
        part = pending.pop()
        arguments = get_args(part)
        if arguments:
            pending.extend(arguments)
        elif isinstance(part, type) and part not in (type(None), Any, object):
            found.append(part)
    if found and kind is Kind.EVENT:
        raise ConfigError(
            f"event handler {name} has the return hint {hint!r}; an event handler returns"
            " nothing: use @router.command(source=…) for one that returns events"
        )
    return found


UNTIL: ContextVar[float | None] = ContextVar("conquiet.until", default=None)
"""The time (by `time.monotonic`) at which a coroutine is cancelled."""

_SECONDS_TO_CANCEL = 5.0


class LoopThread:
    """Runs coroutines: in an async worker on its event loop, else on a loop in a thread.

    All threads of a router's workers share one loop, started on first use: async clients belong to
    the loop that they were created on. A coroutine runs in a copy of the caller's context and sees
    its ambient transaction.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; return its result or raise its exception."""
        if bridge.is_inside():
            until = UNTIL.get()
            return bridge.wait_for(coroutine if until is None else _limit(coroutine, until))
        loop = self._ensure_running()
        context = copy_context()
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(coroutine, context=context)
            tasks.append(task)
            task.add_done_callback(lambda task: _hand_over(task, done))

        until = UNTIL.get()
        loop.call_soon_threadsafe(begin)
        try:
            if until is not None and not wait((done,), until - time.monotonic()).done:
                raise DeadlineExceeded("the coroutine did not end in time")
            return done.result()
        except BaseException:
            # An interrupt of the waiting thread must cancel the handler as well.
            if not done.done():
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                if until is not None:  # its clean-up may need the transaction
                    wait((done,), _SECONDS_TO_CANCEL)
            raise

    def enter(self, user: object) -> None:
        """Keep the loop running until this user, and all others, leave."""
        with self._lock:
            self._users.add(user)

    def leave(self, user: object) -> None:
        """Close the loop if this was its last user."""
        with self._lock:
            was_last = self._users == {user}
            self._users.discard(user)
        if was_last:
            self.close()

    def close(self) -> None:
        """Cancel running coroutines and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=5)

    def _ensure_running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="conquiet-loop", daemon=True
                )
                self._thread.start()
            return self._loop


async def _limit(coroutine: Coroutine[Any, Any, T], until: float) -> T:
    try:
        async with asyncio.timeout(until - time.monotonic()) as limit:
            return await coroutine
    except TimeoutError as error:
        if not limit.expired():  # raised by the handler itself
            raise
        raise DeadlineExceeded("the coroutine did not end in time") from error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run(loop)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run until `close` stops the loop."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # asyncio passes it to the task that raised it, and ends the loop too: threads that
            # wait for a task would wait for ever.
            continue


def _hand_over(task: asyncio.Task[T], done: Future[T]) -> None:
    if done.done():
        return
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
