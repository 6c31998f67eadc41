"""What docs/redis.md says about transactions is so; tests/unit/test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import redis
from tests.integration.redis.conftest import numbered

from conquiet.message import Message
from conquiet.redis import Inbox, Outbox, Transaction, commands
from conquiet.router import Router
from conquiet.testing import deliver, message

PAGE = Path(__file__).parents[3] / "docs" / "redis.md"


def test_a_user_with_the_permissions_of_the_page_can_work(redis_client):
    [allowed] = re.findall(r"A user of Redis needs `([^`]+)`", PAGE.read_text())
    by_redis_py = (
        "+command",
        "+client",
        "+hello",
    )  # of client, SETINFO; Redis 7.0 has no such part
    rights = (*allowed.split(), "+xadd", "+xack", "+hset", *by_redis_py)
    redis_client.execute_command("ACL", "SETUSER", "clerk", "on", ">pass", "~*", *rights)
    settings = redis_client.connection_pool.connection_kwargs
    user = {"username": "clerk", "password": "pass"}
    try:
        with redis.Redis(port=settings["port"], db=0, **user) as client:
            router = Router()
            router.use(Transaction(client), Inbox("billing"), Outbox("sales", "outbox"))

            @router.raw(name="handler", source="/billing")
            def handle(item: Message[bytes]) -> list[Message[bytes]]:
                commands(client).hset("order", item.id, "billed")
                if item.id == "bad":
                    raise ZeroDivisionError
                return [Message(b"", {"type": "billed"})]

            for _ in range(2):
                delivered = deliver(router, *numbered(2), message(id="bad"))
                assert len(delivered.acked) == 2
    finally:
        redis_client.execute_command("ACL", "DELUSER", "clerk")
    assert redis_client.xlen("outbox") == 2


def test_the_memory_of_an_inbox_is_what_the_page_says(redis_client):
    router = Router()
    router.use(Transaction(redis_client), Inbox("shop"))

    @router.raw(name="place_order")
    def handle(item: Message[bytes]) -> None: ...

    before = redis_client.info("memory")["used_memory_dataset"]
    count = 5_000
    for first in range(0, count, 500):
        names = range(first, first + 500)
        deliver(router, *[message(id=f"018f3a4e-7c1b-7000-8000-{n:012d}") for n in names])
    after = redis_client.info("memory")["used_memory_dataset"]
    [said] = re.findall(r"× about (\d+)\s+bytes", PAGE.read_text())
    assert (after - before) / count < 2 * int(said)
