"""Give a handler what its parameters ask for: by annotation, or by a provider of the application.

    def place_order(order: PlaceOrder, session: Session, mailer: Annotated[Mailer, Depends(mail)])
                    └ the data         └ by annotation   └ by a provider, which may ask in turn

Providers are functions, coroutine functions, or generators that yield once: what follows the
`yield` runs when the handler has returned or failed, before the commit. A provider that catches an
exception of the handler must raise it again. A provider is called once per call of a handler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from conquiet.errors import ConfigError, HandlerError
from conquiet.handler import function_name, type_hints
from conquiet.message import Message


class Depends:
    """Names the provider of a parameter: `mailer: Annotated[Mailer, Depends(make_mailer)]`.

    `dependency` is a function, a generator that yields once, or a context manager; left out, it is
    the class that annotates the parameter. FastAPI's own `Depends` is understood as well. Without
    `use_cache`, each parameter gets a value of its own.
    """

    __slots__ = ("dependency", "use_cache")

    def __init__(
        self, dependency: Callable[..., Any] | None = None, *, use_cache: bool = True
    ) -> None:
        self.dependency = dependency
        self.use_cache = use_cache


class Form(Enum):
    """How a provider gives its value."""

    VALUE = "value"
    CONTEXT = "context"
    COROUTINE = "coroutine"
    ASYNC_CONTEXT = "async context"
    MESSAGE = "message"
    DATA = "data"

    @property
    def is_async(self) -> bool:
        return self in (Form.COROUTINE, Form.ASYNC_CONTEXT)


@dataclass(frozen=True)
class Provider:
    """Makes the value of a parameter, by `make` with the values that it `needs` itself."""

    make: Callable[..., Any]
    form: Form = Form.VALUE
    needs: Mapping[str, Provider] = field(default_factory=dict)
    key: Any = None
    """By which parameters of one call share a value; None if each has its own."""


MESSAGE = Provider(lambda: None, Form.MESSAGE)
"""Gives the message; to a handler of batches, the list of messages."""

DATA = Provider(lambda: None, Form.DATA)
"""Gives the data of the message, where it is a parameter among others."""

Find: TypeAlias = Callable[[Any, bool], Provider | None]
"""Returns the provider of an annotation, for an async handler or not; None if there is none."""


def inject(function: Callable[..., Any], name: str, find: Find) -> Callable[..., Any]:
    """Return a function of data and message that calls `function` with all its parameters.

    A parameter without a provider is refused. A function without further parameters is returned
    as it is.
    """
    hints = type_hints(function, f"handler {name}", include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].name not in hints:
        return function  # the handler refuses it
    first, rest = parameters[0], parameters[1:]
    takes = _plain(hints[first.name])
    asked = _Asked(f"handler {name}", is_coroutine(function), _is_list(takes), find)
    needs = asked.providers(rest, hints)
    return _make_call(function, needs, name, takes, hints, is_first=True) if needs else function


def inject_all(
    function: Callable[..., Any], name: str, find: Find, takes: type
) -> Callable[..., Any]:
    """Do as `inject` for a function that need not take the data: all its parameters are provided.

    Those that are annotated by `takes` get the data.
    """
    hints = type_hints(function, f"handler {name}", include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())

    def find_data(kind: Any, is_async: bool) -> Provider | None:
        return DATA if kind is takes else find(kind, is_async)

    asked = _Asked(f"handler {name}", is_coroutine(function), False, find_data)
    needs = asked.providers(parameters, hints)
    return _make_call(function, needs, name, takes, hints, is_first=False)


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether a function is `async def`, with or without `yield`."""
    called = inspect.unwrap(function)
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def _make_call(
    function: Callable[..., Any],
    needs: Mapping[str, Provider],
    name: str,
    takes: Any,
    hints: Mapping[str, Any],
    *,
    is_first: bool,
) -> Callable[..., Any]:
    make = _async_call if is_coroutine(function) else _sync_call
    call = make(function, needs, name, is_first)
    call.__name__ = call.__qualname__ = name
    call.__module__ = getattr(function, "__module__", __name__)
    call.__annotations__ = {"data": takes, "message": Any, "return": _plain(hints.get("return"))}
    return call


def _sync_call(
    function: Callable[..., Any], needs: Mapping[str, Provider], name: str, is_first: bool
) -> Callable[[Any, Any], Any]:
    yields = inspect.isgeneratorfunction(inspect.unwrap(function))

    def call(data: Any, message: Any) -> Any:
        with ExitStack() as stack:
            given = (data,) if is_first else ()
            returned = function(*given, **_open(_fill(needs, message, {}), stack))
            return list(returned) if yields else returned
        raise _swallowed(name)

    return call


def _async_call(
    function: Callable[..., Any], needs: Mapping[str, Provider], name: str, is_first: bool
) -> Callable[[Any, Any], Any]:
    yields = inspect.isasyncgenfunction(inspect.unwrap(function))

    async def call(data: Any, message: Any) -> Any:
        async with AsyncExitStack() as stack:
            given = (data,) if is_first else ()
            arguments = await _open_async(_fill(needs, message, {}), stack)
            returned = function(*given, **arguments)
            return [item async for item in returned] if yields else await returned
        raise _swallowed(name)

    return call


def _swallowed(name: str) -> HandlerError:
    """Return the error of a call that failed and whose `with` block ended without an exception."""
    return HandlerError(
        f"handler {name} failed, and a provider caught the exception, so that half of its effects"
        " would be committed; raise it again in the provider, after its `yield`"
    )


Arguments: TypeAlias = Generator[tuple[Form, Any], Any, dict[str, Any]]


def _fill(needs: Mapping[str, Provider], message: Any, made: dict[Any, Any]) -> Arguments:
    """Return the arguments for parameters; `made` holds what was made for this call.

    Yields what a provider has made, if it must be awaited or entered, and is sent its value.
    """
    values: dict[str, Any] = {}
    for name, provider in needs.items():
        if provider.form in (Form.MESSAGE, Form.DATA):
            values[name] = message if provider.form is Form.MESSAGE else message.decoded
            continue
        if provider.key is not None and provider.key in made:
            values[name] = made[provider.key]
            continue
        inner = yield from _fill(provider.needs, message, made)
        value = provider.make(**inner)
        if provider.form is not Form.VALUE:
            value = yield provider.form, value
        values[name] = made[provider.key] = value
    return values


def _open(arguments: Arguments, stack: ExitStack) -> dict[str, Any]:
    value: Any = None
    while True:
        try:
            _, opened = arguments.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a generator's value is Any
        value = stack.enter_context(opened)


async def _open_async(arguments: Arguments, stack: AsyncExitStack) -> dict[str, Any]:
    value: Any = None
    while True:
        try:
            form, opened = arguments.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a generator's value is Any
        if form is Form.COROUTINE:
            value = await opened
        elif form is Form.CONTEXT:
            value = stack.enter_context(opened)
        else:
            value = await stack.enter_async_context(opened)


@dataclass(frozen=True)
class _Asked:
    """Finds the providers of parameters, and refuses a parameter that has none."""

    owner: str
    is_async: bool
    is_batch: bool
    find: Find
    path: tuple[Callable[..., Any], ...] = ()
    """The providers that led here, to refuse a circle."""

    def providers(
        self, parameters: list[inspect.Parameter], hints: Mapping[str, Any]
    ) -> dict[str, Provider]:
        found: dict[str, Provider] = {}
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            provider = self._provider(parameter, hints.get(parameter.name))
            if provider is not None:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    raise ConfigError(
                        f"{self.owner}: parameter {parameter.name!r} is positional-only; move the"
                        " slash in front of it, since providers give values by name"
                    )
                found[parameter.name] = provider
            elif parameter.default is parameter.empty:
                raise self._missing(parameter, hints.get(parameter.name))
        return found

    def _provider(self, parameter: inspect.Parameter, hint: Any) -> Provider | None:
        marks = [parameter.default]
        if get_origin(hint) is Annotated:
            marks += reversed(hint.__metadata__)
        for mark in marks:
            if hasattr(mark, "dependency") and hasattr(mark, "use_cache"):
                make = mark.dependency or _plain(hint)
                if not callable(make):
                    raise ConfigError(
                        f"{self.owner}: Depends of {parameter.name!r} names {make!r:.60}, which"
                        " cannot be called"
                    )
                return self._by_function(make, bool(mark.use_cache))
        if hint is None:
            return None
        return self._by_annotation(parameter.name, _plain(hint))

    def _by_annotation(self, name: str, kind: Any) -> Provider | None:
        kind = _not_none(kind)
        item = get_args(kind)[0] if _is_list(kind) else kind
        if (get_origin(item) or item) is Message:
            if _is_list(kind) != self.is_batch:
                right = "list[Message]" if self.is_batch else "Message"
                raise ConfigError(f"{self.owner}: annotate {name!r} as {right}")
            return MESSAGE
        try:
            return self.find(kind, self.is_async)
        except ConfigError as error:
            raise ConfigError(f"{self.owner}: parameter {name!r}: {error}") from None

    def _by_function(self, make: Callable[..., Any], is_cached: bool) -> Provider:
        name = function_name(make)
        if make in self.path:
            raise ConfigError(f"{self.owner}: provider {name} needs itself")
        form, open_ = _form(make)
        if form.is_async and not self.is_async:
            raise ConfigError(
                f"{self.owner} is not async, and its provider {name} is; write async def in front"
                " of the handler, or use a provider without async"
            )
        inner = _Asked(
            f"provider {name} of {self.owner}",
            self.is_async,
            self.is_batch,
            self.find,
            (*self.path, make),
        )
        hints = type_hints(make, f"provider {name}", include_extras=True)
        needs = inner.providers(_parameters(make), hints)
        return Provider(open_, form, needs, _key(make) if is_cached else None)

    def _missing(self, parameter: inspect.Parameter, hint: Any) -> ConfigError:
        name = parameter.name
        kind = getattr(_plain(hint), "__name__", None) or "…"
        what = f"{name}: {kind}" if hint is not None else f"{name}, which has no annotation,"
        return ConfigError(
            f"{self.owner}: no provider for the parameter {what}; write"
            f" {name}: Annotated[{kind}, Depends(make_{name})], give it a default, or annotate it"
            " with one of Session, AsyncSession, Connection, AsyncConnection, Message, redis.Redis"
        )


def _form(make: Callable[..., Any]) -> tuple[Form, Callable[..., Any]]:
    called = make if inspect.isroutine(make) or inspect.isclass(make) else type(make).__call__
    if inspect.isgeneratorfunction(called):
        return Form.CONTEXT, contextmanager(make)
    if inspect.isasyncgenfunction(called):
        return Form.ASYNC_CONTEXT, asynccontextmanager(make)
    if inspect.iscoroutinefunction(called):
        return Form.COROUTINE, make
    return Form.VALUE, make


def _key(make: Callable[..., Any]) -> Any:
    try:
        hash(make)
    except TypeError:
        return id(make)
    return make


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _not_none(hint: Any) -> Any:
    """Return X of `X | None`: a default of None must not keep a provider's value away."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, Sequence) and bool(get_args(kind))


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(make).parameters.values())
    except ValueError:  # a function in C without a signature takes nothing that we know
        return []
