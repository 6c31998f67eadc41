"""What the world does to a service. Each fault happens, lasts a while, and ends as it returns."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import psycopg
import redis
from tests.faults.proxy import Proxy
from tests.faults.world.service import LEASE
from tests.faults.world.stack import CONNECTIONS, VICTIMS, World

Fault = Callable[[World, random.Random], str]
NOT_DONE = "not done: no rights to mount a small disk"


def a_process_is_killed(world: World, dice: random.Random) -> str:
    role = dice.choice(VICTIMS)
    world.processes[role].kill()
    return role


def a_process_is_frozen_beyond_its_lease(world: World, dice: random.Random) -> str:
    role = dice.choice(VICTIMS)
    popen = world.processes[role].popen
    assert popen is not None
    os.kill(popen.pid, signal.SIGSTOP)
    try:
        time.sleep(LEASE * 1.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(popen.pid, signal.SIGCONT)
    return role


def postgresql_stops_at_once_and_restarts(world: World, dice: random.Random) -> str:
    with world.server_down("postgres"):
        time.sleep(dice.uniform(0.1, 1.5))
    return ""


def redis_is_killed_and_restarts_from_its_aof(world: World, dice: random.Random) -> str:
    with world.server_down("redis"):
        time.sleep(dice.uniform(0.1, 1.5))
    return ""


def _proxy(world: World, dice: random.Random, kind: str = "") -> tuple[str, Proxy]:
    name = dice.choice(sorted(name for name in world.proxies if name.endswith(kind)))
    return name, world.proxies[name]


def connections_are_cut(world: World, dice: random.Random) -> str:
    name, proxy = _proxy(world, dice)
    for _ in range(10):
        proxy.cut()
        time.sleep(dice.uniform(0.01, 0.2))
    return name


def connections_are_refused(world: World, dice: random.Random) -> str:
    name, proxy = _proxy(world, dice)
    with proxy.outage():
        time.sleep(dice.uniform(0.2, 2.0))
    return name


def the_network_is_slow(world: World, dice: random.Random) -> str:
    name, proxy = _proxy(world, dice)
    proxy.delay(dice.uniform(0.05, 0.3))
    time.sleep(2.0)
    proxy.heal()
    return name


def connections_are_half_closed(world: World, dice: random.Random) -> str:
    """Requests arrive, and answers do not: at first in silence, then with a FIN."""
    name, proxy = _proxy(world, dice)
    proxy.mute()
    time.sleep(dice.uniform(0.5, 2.0))
    proxy.cut()
    proxy.heal()
    for _ in range(5):
        time.sleep(dice.uniform(0.05, 0.3))
        proxy.half_close()
    return name


def a_broker_accepts_and_does_not_confirm(world: World, dice: random.Random) -> str:
    """The relay's, for longer than it waits for a confirmation."""
    proxy = world.proxies["relay redis"]
    proxy.mute()
    time.sleep(4.0)
    proxy.cut()
    proxy.heal()
    return "relay redis"


def replies_are_lost(world: World, dice: random.Random) -> str:
    name, proxy = _proxy(world, dice)
    for _ in range(5):
        proxy.lose_replies(2)
        time.sleep(dice.uniform(0.05, 0.3))
    proxy.heal()
    return name


def backends_are_terminated(world: World, dice: random.Random) -> str:
    with psycopg.connect(world.postgres.url, autocommit=True) as connection:
        for _ in range(5):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            time.sleep(dice.uniform(0.05, 0.3))
    return ""


def all_connections_of_postgresql_are_taken(world: World, dice: random.Random) -> str:
    with contextlib.ExitStack() as held:
        with contextlib.suppress(psycopg.OperationalError):
            for _ in range(CONNECTIONS):
                connection = psycopg.connect(world.postgres.url)
                held.enter_context(contextlib.closing(connection))
        for name in ("worker postgres", "relay postgres"):
            if name in world.proxies:
                world.proxies[name].cut()  # who has none now gets none
        time.sleep(dice.uniform(0.5, 2.0))
    return ""


def redis_is_out_of_memory(world: World, dice: random.Random) -> str:
    with world.client() as client:
        client.config_set("maxmemory", "1mb")
        try:
            time.sleep(dice.uniform(0.5, 2.0))
        finally:
            client.config_set("maxmemory", "0")
    return "maxmemory, noeviction"


def the_disk_is_full(world: World, dice: random.Random) -> str:
    if None in world.disks.values():
        return NOT_DONE
    kind = dice.choice(("postgres", "redis"))
    server = getattr(world, kind)
    with world.full_disk(kind):
        if kind == "postgres" and dice.random() < 0.5:
            with contextlib.suppress(psycopg.Error), psycopg.connect(world.postgres.url) as found:
                found.execute("SELECT pg_switch_wal()")  # the next one has no room
        time.sleep(dice.uniform(1.0, 3.0))
        died = not server.running
    return f"{server.kind}, which {'died' if died else 'did not die'} of it"


def the_clock_jumps(world: World, dice: random.Random) -> str:
    seconds = dice.choice((-86_400, -3_600, -10, 10, 3_600, 86_400))
    clock = world.folder / "clock"
    clock.write_text(str(seconds))
    time.sleep(1.5)
    clock.unlink()
    return f"{seconds} s, and back"


def handlers_are_slow(world: World, dice: random.Random) -> str:
    slow = world.folder / "slow"
    slow.write_text(str(dice.choice((0.01, 0.05))))
    time.sleep(2.0)
    slow.unlink()
    return ""


def several_at_once(world: World, dice: random.Random) -> str:
    chosen = dice.sample([fault for fault in FAULTS if fault is not several_at_once], 3)
    told: list[str] = []

    def one(fault: Fault, seed: int) -> None:
        try:
            told.append(f"{named(fault)} {fault(world, random.Random(seed))}".strip())
        except (redis.RedisError, psycopg.Error) as error:  # the server it speaks to is away too
            told.append(f"{named(fault)} (cut short: {type(error).__name__})")

    threads = [
        threading.Thread(target=one, args=(fault, dice.randrange(1 << 30))) for fault in chosen
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "; ".join(told)


FAULTS: tuple[Fault, ...] = (
    a_process_is_killed,
    a_process_is_frozen_beyond_its_lease,
    postgresql_stops_at_once_and_restarts,
    redis_is_killed_and_restarts_from_its_aof,
    connections_are_cut,
    connections_are_refused,
    the_network_is_slow,
    connections_are_half_closed,
    a_broker_accepts_and_does_not_confirm,
    replies_are_lost,
    backends_are_terminated,
    all_connections_of_postgresql_are_taken,
    redis_is_out_of_memory,
    the_disk_is_full,
    the_clock_jumps,
    handlers_are_slow,
    several_at_once,
)


def named(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")
