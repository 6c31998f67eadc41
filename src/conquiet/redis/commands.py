"""commands(client): how an adapter writes, inside a transaction and outside.

Inside, a write waits for EXEC and has no result yet; a read is refused, since it could not see
the transaction's own writes and would have no result either (R10). Which is which is known for
the commands of Redis 6.0 to 8; about others, as those of modules, the server is asked once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from redis.commands import CoreCommands, RedisModuleCommands

from conquiet.errors import HandlerError
from conquiet.redis.ambient import Unit, find
from conquiet.redis.queued import Queued

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
"""Commands that wait for EXEC. Scripts are among them, as they may write."""

_STORING = frozenset(("SORT", "GEORADIUS", "GEORADIUSBYMEMBER"))
"""Commands that write only where they are told to store."""

_FOR_THE_RESULT = frozenset(
    """BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH BZMPOP BZPOPMAX BZPOPMIN XREADGROUP XCLAIM
    XAUTOCLAIM""".split()  # noqa: SIM905
)
"""Commands that write, and whose only use is what they return."""


def commands(client: Any) -> Any:
    """The commands of the ambient transaction on the client's database; outside, the client.

    An adapter writes `commands(self.client).hset("order:17", "status", "placed")` and knows of no
    transaction. Ask anew each time: what was asked for inside one ends with it.
    """
    unit = find(client)
    return client if unit is None else Commands(unit, client)


class Commands(CoreCommands, RedisModuleCommands):
    """redis-py's methods, queued in a transaction. `reader` is the plain client, for reads."""

    _event_dispatcher: Any = None  # where redis-py announces what it does; nothing is done here

    def __init__(self, unit: Unit, client: Any) -> None:
        self._unit = unit
        self._client = client

    @property
    def reader(self) -> Any:
        """The plain client: reads what is committed, and nothing of this transaction."""
        self._unit.check()
        return self._client

    def execute_command(self, *args: Any, **options: Any) -> Queued:
        first = args[0]
        name = (first.decode() if isinstance(first, bytes) else first).upper()
        if name not in WRITES:
            if " " in name:  # redis-py writes "XGROUP CREATE" as one word
                words = name.split()
                return self.execute_command(*words, *args[1:], **options)
            self._unit.check()
            self._look_up(name, args)
        return self._unit.queue(name, args)

    def _look_up(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Let pass what writes; refuse the rest, and say why."""
        if name in _STORING:
            words = {str(_plain(word)).upper() for word in arguments[2:]}
            if words & {"STORE", "STOREDIST"}:
                return
        elif name == "EVALSHA":
            raise HandlerError(
                "EVALSHA in a transaction: if the server does not know the script, the commands"
                " around it take effect without it; use eval() or register_script()"
            )
        elif name not in _FOR_THE_RESULT and "write" in self._unit.home.flags(name):
            return
        raise HandlerError(
            f"{name} inside a transaction has no result before EXEC, and is not known to write;"
            f" read with commands(client).reader, which is the plain client and sees what is"
            " committed"
        )

    # --- what redis-py's clients can do besides commands ----------------------------------------

    def watch(self, *names: Any) -> None:
        """Watch keys from now on: if one changes before EXEC, nothing is written, and the
        handler runs again. Read them by `reader` afterwards."""
        encode = self._client.get_encoder().encode
        self._unit.watch([bytes(encode(name)) for name in names])

    def register_script(self, script: str | bytes) -> Any:  # type: ignore[override]
        """A script that is sent whole: see EVALSHA."""

        def run(keys: Iterable[Any] = (), args: Iterable[Any] = (), client: Any = None) -> Queued:
            named = list(keys)
            return self.execute_command("EVAL", script, len(named), *named, *args)

        return run

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Commands:
        """This transaction once more: a pipeline inside it needs no EXEC of its own."""
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
        """Modules of redis-py set these; there are no responses here."""

    def __repr__(self) -> str:
        return f"<Commands of a transaction on {self._client!r}>"


class Pipelined(Commands):
    """A pipeline inside a transaction: `execute` leaves its commands to the EXEC around it."""

    def __enter__(self) -> Pipelined:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def multi(self) -> None:
        """Said already."""

    def reset(self) -> None:  # type: ignore[override]
        """There is nothing of its own to forget; what was queued stays so."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        return []


def _plain(word: Any) -> Any:
    return word.decode(errors="replace") if isinstance(word, bytes) else word


def _not_here(what: str) -> HandlerError:
    return HandlerError(
        f"{what} inside a transaction, which has one EXEC for all; use the plain client for it:"
        " commands(client).reader"
    )
