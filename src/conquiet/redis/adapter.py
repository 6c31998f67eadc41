"""commands(client): the commands of an adapter, inside a transaction and outside.

Inside, a write waits for EXEC and has no result yet; a read is refused, since it would not see
the transaction's own writes and would have no result either. The commands of Redis 6.0 to 8 are
listed here; about others, such as those of modules, the server is asked once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from redis.commands import CoreCommands, RedisModuleCommands

from conquiet import bridge
from conquiet.errors import HandlerError
from conquiet.redis.loop_client import is_async
from conquiet.redis.transaction import (
    AwaitableQueued,
    Queued,
    Unit,
    find_unit,
    is_inside,
    warn_of_other_thread,
)

T = TypeVar("T")

WRITES = frozenset(
    """APPEND BITFIELD BITOP COPY DECR DECRBY DEL DELEX EXPIRE EXPIREAT GEOADD GEOSEARCHSTORE GETDEL
    GETEX GETSET HDEL HEXPIRE HEXPIREAT HGETDEL HGETEX HINCRBY HINCRBYFLOAT HMSET HPERSIST HPEXPIRE
    HPEXPIREAT HSET HSETEX HSETNX INCR INCRBY INCRBYFLOAT LINSERT LMOVE LMPOP LPOP LPUSH LPUSHX
    LREM LSET LTRIM MSET MSETEX MSETNX PERSIST PEXPIRE PEXPIREAT PFADD PFMERGE PSETEX PUBLISH RENAME
    RENAMENX RESTORE RPOP RPOPLPUSH RPUSH RPUSHX SADD SDIFFSTORE SET SETBIT SETEX SETNX SETRANGE
    SINTERSTORE SMOVE SPOP SPUBLISH SREM SUNIONSTORE UNLINK XACK XACKDEL XADD XDEL XDELEX XGROUP
    XSETID XTRIM ZADD ZDIFFSTORE ZINCRBY ZINTERSTORE ZMPOP ZPOPMAX ZPOPMIN ZRANGESTORE ZREM
    ZREMRANGEBYLEX ZREMRANGEBYRANK ZREMRANGEBYSCORE ZUNIONSTORE EVAL FCALL FLUSHDB""".split()  # noqa: SIM905 - it reads better
)
"""Commands that wait for EXEC. Scripts are among them, since they may write."""

_STORING = frozenset(("SORT", "GEORADIUS", "GEORADIUSBYMEMBER"))
"""Commands that write only with the option STORE."""

_FOR_THE_RESULT = frozenset(
    """BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH BZMPOP BZPOPMAX BZPOPMIN XREADGROUP XCLAIM
    XAUTOCLAIM""".split()  # noqa: SIM905
)
"""Commands that write, and are of no use without their result."""


def commands(client: Any, *, outside: bool = False) -> Any:
    """Return the commands of the ambient transaction on the client's database, or the client.

    An adapter writes `commands(self.client).hset("order:17", "status", "placed")` and need not know
    of the transaction. Call it each time: what it returned inside a transaction ends with it. With
    a client of `redis.asyncio` the commands are awaited, inside and outside.

    Inside a transaction, a client of another database is refused, since its writes would take
    effect whether the transaction does or not. With `outside` it is returned as it is.
    """
    if not is_inside():
        if not outside:
            warn_of_other_thread(client)
        return client
    unit = find_unit(client)
    if unit is not None:
        return (AsyncCommands if is_async(client) else Commands)(unit, client)
    if outside:
        return client
    raise HandlerError(
        f"{client!r} is not known to be on the database of the transaction, so that its writes"
        " would take effect at once, whether the transaction does or not; use the transaction's"
        " client, or say commands(client, outside=True)"
    )


class Commands(CoreCommands, RedisModuleCommands):
    """redis-py's methods, queued in a transaction. `reader` is the plain client, for reads."""

    _event_dispatcher: Any = None  # redis-py reports what it sends here; nothing is sent
    _queued = Queued

    def __init__(self, unit: Unit, client: Any) -> None:
        self._unit = unit
        self._client = client

    @property
    def reader(self) -> Any:
        """The plain client, which reads committed data and nothing of this transaction."""
        self._unit.check()
        return self._client

    def execute_command(self, *args: Any, **options: Any) -> Queued:
        """Queue a write; raises for a read."""
        name, args = _split(args)
        if name not in WRITES:
            self._unit.check()
            self._look_up(name, args)
        return self._unit.queue(name, args, self._queued)

    def _look_up(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Return for a command that writes; raise for others, with the reason."""
        if name in _STORING:
            words = {str(_plain(word)).upper() for word in arguments[2:]}
            if words & {"STORE", "STOREDIST"}:
                return
        elif name == "EVALSHA":
            raise HandlerError(
                "EVALSHA in a transaction: if the server does not know the script, the commands"
                " around it take effect without it; use eval() or register_script()"
            )
        elif name not in _FOR_THE_RESULT and "write" in self._unit.database.flags(name):
            return
        raise HandlerError(
            f"{name} inside a transaction has no result before EXEC, and is not known to write;"
            f" read with commands(client).reader, which is the plain client and sees what is"
            " committed"
        )

    # --- what redis-py's clients can do besides commands ----------------------------------------

    def watch(self, *names: Any) -> None:
        """Watch keys: if one changes before EXEC, nothing is written and the handler runs again.

        Read them by `reader` afterwards.
        """
        encode = self._client.get_encoder().encode
        self._unit.watch([bytes(encode(name)) for name in names])

    def register_script(self, script: str | bytes) -> Any:  # type: ignore[override]
        """Return a script that is sent whole, by EVAL."""

        def run(keys: Iterable[Any] = (), args: Iterable[Any] = (), client: Any = None) -> Queued:
            named = list(keys)
            return self.execute_command("EVAL", script, len(named), *named, *args)

        return run

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Commands:
        """Return a pipeline whose commands wait for the EXEC of this transaction."""
        self._unit.check()
        return Pipelined(self._unit, self._client)

    def transaction(self, *args: Any, **options: Any) -> NoReturn:
        raise _not_here("transaction()")

    def lock(self, *args: Any, **options: Any) -> NoReturn:
        raise _not_here("lock()")

    def pubsub(self, **options: Any) -> NoReturn:
        raise _not_here("pubsub()")

    def monitor(self) -> NoReturn:
        raise _not_here("monitor()")

    def get_encoder(self) -> Any:
        return self._client.get_encoder()

    def get_connection_kwargs(self) -> Any:
        return self._client.get_connection_kwargs()

    def set_response_callback(self, command: str, callback: Any) -> None:
        """Do nothing: modules of redis-py call it, and there are no responses here."""

    def __repr__(self) -> str:
        return f"<Commands of a transaction on {self._client!r}>"


class Pipelined(Commands):
    """A pipeline inside a transaction: `execute` leaves its commands to the EXEC around it."""

    def __enter__(self) -> Pipelined:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def multi(self) -> None:
        """Do nothing: the transaction around it has begun."""

    def reset(self) -> None:  # type: ignore[override]
        """Do nothing: queued commands belong to the transaction around it."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Do nothing: the transaction around it sends EXEC."""
        return []


class AsyncCommands(Commands):
    """The commands of a `redis.asyncio` client, queued in a transaction; each may be awaited."""

    _queued = AwaitableQueued

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Queue a write; raises for a read, when it is awaited."""
        name, args = _split(args)
        if name in WRITES:
            return self._unit.queue(name, args, self._queued)
        return self._wait(super().execute_command, *args)  # it may have to ask the server

    async def watch(self, *names: Any) -> None:  # type: ignore[override]
        """Watch keys: if one changes before EXEC, nothing is written and the handler runs again.

        Read them by `reader` afterwards.
        """
        await self._wait(super().watch, *names)

    async def _wait(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._unit.database.is_async:
            return await bridge.run(function, *arguments)
        return await asyncio.to_thread(function, *arguments)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Commands:
        """Return a pipeline whose commands wait for the EXEC of this transaction."""
        self._unit.check()
        return AsyncPipelined(self._unit, self._client)


class AsyncPipelined(AsyncCommands):
    """A pipeline inside a transaction: `execute` leaves its commands to the EXEC around it."""

    async def __aenter__(self) -> AsyncPipelined:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def multi(self) -> None:
        """Do nothing: the transaction around it has begun."""

    async def reset(self) -> None:  # type: ignore[override]
        """Do nothing: queued commands belong to the transaction around it."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Do nothing: the transaction around it sends EXEC."""
        return []


def _split(arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return the name of a command, and its words: redis-py writes "XGROUP CREATE" as one."""
    first, *rest = arguments
    name = (first.decode() if isinstance(first, bytes) else first).upper()
    if " " not in name:
        return name, arguments
    words = name.split()
    return words[0], (*words, *rest)


def _plain(word: Any) -> Any:
    return word.decode(errors="replace") if isinstance(word, bytes) else word


def _not_here(what: str) -> HandlerError:
    return HandlerError(
        f"{what} inside a transaction, which has one EXEC for all; use the plain client for it:"
        " commands(client).reader"
    )
