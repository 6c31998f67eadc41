"""What the programs of all peers share: where the servers are, and what they are told to do.

    PEER.py work     handle commands, until it is killed
    PEER.py send     send the commands that come by standard input, and say so of each
    PEER.py sell     for ever: a business row, then its command; in a child that may be killed

PEER_SAFE is empty for the defaults of a peer, else its settings are those that lose least.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import psycopg

REDIS = os.environ["PEER_REDIS"]
DATABASE = os.environ["PEER_DATABASE"]
KIND = os.environ["PEER_KIND"]
IS_SAFE = bool(os.environ["PEER_SAFE"])

RETURN_SECONDS = 5
"""After which a killed process' work is given to another, wherever a peer lets one choose."""
EFFECT = "INSERT INTO effects (command) VALUES (%s)"
SALE = "INSERT INTO sales (command) VALUES (%s)"


def connect() -> psycopg.Connection:
    return psycopg.connect(DATABASE, autocommit=True)


def main(
    *,
    work: Callable[[], Any],
    send: Callable[[str], Any],
    sell: Callable[[psycopg.Connection, str], Any] | None = None,
    prepare: Callable[[], Any] = lambda: None,
    start: Callable[[], Any] = lambda: None,
    finish: Callable[[], Any] = lambda: None,
) -> Any:
    """`prepare` is for the database, once; `start` for every process that sends."""
    if sys.argv[1] == "work":
        return asyncio.run(work()) if inspect.iscoroutinefunction(work) else work()
    prepare()
    print("ready", flush=True)
    if sys.argv[1] == "send":
        return asyncio.run(_send(start, send))
    for _ in sys.stdin:  # one child after another: imports are paid for once
        child = os.fork()
        if child == 0:
            asyncio.run(_sell(start, send, sell))
        print(child, flush=True)
        os.waitpid(child, 0)
    return finish()


async def _send(start: Callable[[], Any], send: Callable[[str], Any]) -> None:
    await _done(start())
    for line in sys.stdin:
        await _done(send(line.strip()))
        print(line, end="", flush=True)


async def _sell(start: Any, send: Any, sell: Any) -> None:
    """New commands, after those that earlier processes have sold."""
    await _done(start())
    connection = connect()
    (sold,) = connection.execute("SELECT count(*) FROM sales").fetchone()
    for number in itertools.count(sold):
        command = f"cmd-{number:05}"
        if sell:
            await _done(sell(connection, command))
        else:
            connection.execute(SALE, [command])
            await _done(send(command))


async def _done(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer
