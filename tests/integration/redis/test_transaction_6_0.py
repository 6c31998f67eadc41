"""Every command and option of a transaction is known to Redis 6.0."""

from __future__ import annotations

import re
import time

import pytest
from tests.integration.redis.conftest import numbered

from conquiet.errors import StoreError
from conquiet.message import Message
from conquiet.redis import Inbox, Outbox, StreamSource, Transaction, commands
from conquiet.router import Router
from conquiet.testing import deliver

KEY = r"conquiet:inbox:\S+ \S+"
KNOWN_TO_6_0 = [
    r"MULTI|EXEC|UNWATCH",
    rf"SET {KEY} processing:[0-9a-f]{{32}} NX PX \d+",
    rf"SET {KEY} done PX \d+",
    rf"SET {KEY} done NX PX \d+",  # setnx
    rf"(WATCH|MGET|DEL)( {KEY})+",
    rf"PEXPIRE {KEY} \d+",
    r"WATCH watched",
    r"XADD outbox \* :topic sales .*",
    r"XACK orders billing( \d+-\d+)+",
    r"COMMAND INFO \S+",
]
OTHERS = re.compile(
    r"HELLO|CLIENT|SELECT|ECHO|EXISTS|XREADGROUP|XPENDING|XGROUP|XCLAIM|XINFO|HSET|HDEL|EVAL|XRANGE|effect|INCRBY"
)


def use_everything(client, publish):
    publish(4)
    source = StreamSource(client, "orders", "billing", backoff=0.0)
    router = Router()
    router.use(Transaction(client), Inbox("billing", lease=0.1), Outbox("sales", "outbox"))
    failures = [ZeroDivisionError(), StoreError("once"), ZeroDivisionError()]

    @router.raw(name="handler", source="/billing")
    def handle(item: Message[bytes]) -> list[Message[bytes]]:
        commands(client).incr("effect")
        if item.id == "m-1":
            time.sleep(0.15)
        if item.id == "m-2" and failures:
            raise failures.pop()
        if item.id == "m-3":
            commands(client).watch("watched")
            commands(client).execute_command("SWAPDB", 0, 0)
        return [Message(b"", {"type": "billed"})]

    for _ in range(5):
        router.process(source.read(10, 0.1))
    source.close()
    deliver(router, *numbered(1))
    claimed = Router()
    claimed.use(Inbox("seed", mode="setnx", client=client), Transaction(client))
    claimed.raw(name="handler")(_fail)
    deliver(claimed, *numbered(1))


def _fail(item: Message[bytes]) -> None:
    raise ZeroDivisionError


@pytest.fixture
def seen(recorded, redis_client, publish):
    sent = recorded(lambda: use_everything(redis_client, publish))
    return [c for c in sent if not OTHERS.match(c) and not re.match("XADD orders|SWAPDB", c)]


def test_every_command_and_option_is_known_to_redis_6_0(seen):
    unknown = [c for c in seen if not any(re.fullmatch(p, c, re.DOTALL) for p in KNOWN_TO_6_0)]
    assert unknown == []


def test_the_recording_saw_every_kind_of_call(seen):
    for pattern in KNOWN_TO_6_0:
        assert any(re.fullmatch(pattern, c, re.DOTALL) for c in seen), pattern
