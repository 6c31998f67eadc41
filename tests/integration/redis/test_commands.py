"""commands(client): writes wait for EXEC, reads are refused with advice."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
import redis
from tests import needs

from conquiet import embedded
from conquiet.errors import HandlerError
from conquiet.redis import Transaction, commands
from conquiet.redis.adapter import WRITES


@pytest.fixture
def transaction(redis_client):
    return Transaction(redis_client)


def test_outside_a_transaction_it_is_the_client_itself(redis_client):
    assert commands(redis_client) is redis_client


def test_inside_writes_wait_for_the_end_and_outside_they_do_not(redis_client, transaction):
    with transaction.scope(()):
        commands(redis_client).hset("order:1", mapping={"status": "placed", "lines": 3})
        commands(redis_client)["plain"] = 1.5
        assert redis_client.keys() == []
    assert redis_client.hgetall("order:1") == {b"status": b"placed", b"lines": b"3"}
    assert redis_client.get("plain") == b"1.5"


def test_another_client_of_the_same_database_joins_the_transaction(redis_client, redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as other:
        scope = Transaction(redis_client).scope(())
        with scope:
            commands(other).set("k", 1)
            assert redis_client.get("k") is None
    assert redis_client.get("k") == b"1"


def test_the_same_server_by_another_name_joins_the_transaction(redis_client, redis_url, recorded):
    assert "127.0.0.1" in redis_url
    transaction = Transaction(redis_client)
    with redis.Redis.from_url(redis_url.replace("127.0.0.1", "localhost")) as other:

        def write():
            for n in range(3):
                with transaction.scope(()):
                    commands(other).set(f"k-{n}", 1)
                    assert redis_client.keys(f"k-{n}") == []

        seen = recorded(write)
    assert redis_client.dbsize() == 3
    assert [command for command in seen if command.startswith("INFO")] == ["INFO server"] * 2


def test_a_unix_socket_of_the_same_server_joins_the_transaction(tmp_path):
    path = tmp_path / "redis.sock"
    options = ("--unixsocket", str(path))
    with (
        needs.found("Redis", lambda: embedded.redis(options=options, private=True)) as server,
        redis.Redis.from_url(server.url) as client,
        redis.Redis(unix_socket_path=str(path)) as other,
    ):
        with Transaction(client).scope(()):
            commands(other).set("k", 1)
            assert client.get("k") is None
        assert client.get("k") == b"1"


def test_a_user_who_may_not_ask_for_the_run_id_is_refused_by_another_name(redis_client):
    redis_client.acl_setuser(
        "shy", enabled=True, nopass=True, commands=["+@all", "-info"], keys="*"
    )
    settings = redis_client.connection_pool.connection_kwargs
    with (
        redis.Redis("127.0.0.1", settings["port"], settings.get("db", 0), username="shy") as same,
        redis.Redis("localhost", settings["port"], settings.get("db", 0), username="shy") as other,
        Transaction(redis_client).scope(()),
    ):
        commands(same).set("k", 1)
        with pytest.raises(HandlerError, match="outside=True"):
            commands(other)
    assert redis_client.get("k") == b"1"


def test_a_client_of_another_database_is_refused_unless_said_to_be_outside(redis_client):
    port = redis_client.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port, db=9) as other, Transaction(redis_client).scope(()):
        with pytest.raises(HandlerError, match="outside=True"):
            commands(other)
        assert commands(other, outside=True) is other


def test_a_client_of_another_server_is_refused_unless_said_to_be_outside(redis_client):
    with (
        needs.found("Redis", lambda: embedded.redis(private=True)) as server,
        redis.Redis.from_url(server.url) as other,
        Transaction(redis_client).scope(()),
    ):
        with pytest.raises(HandlerError, match="outside=True"):
            commands(other)
        assert commands(other, outside=True) is other
        assert commands(redis_client, outside=True) is not redis_client


def run_in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_another_thread_joins_the_transaction_by_a_copied_context(redis_client, transaction):
    with transaction.scope(()):
        context = contextvars.copy_context()
        run_in_thread(lambda: context.run(lambda: commands(redis_client).set("k", 1)))
        assert redis_client.get("k") is None
    assert redis_client.get("k") == b"1"


def test_another_thread_that_writes_outside_the_transaction_is_logged_once(
    redis_client, transaction, caplog
):
    run_in_thread(lambda: commands(redis_client))
    with transaction.scope(()):
        run_in_thread(lambda: commands(redis_client, outside=True))
        assert caplog.messages == []
        for _ in range(2):
            run_in_thread(lambda: commands(redis_client))
    [line] = caplog.messages
    assert "copy_context" in line


def test_an_asyncio_client_joins_a_transaction_of_the_same_address(
    redis_client, redis_url, transaction
):
    async def write():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            assert commands(client) is client
            with transaction.scope(()):
                await commands(client).watch("k")
                await commands(client).set("k", 1)
                with pytest.raises(HandlerError, match=r"read with commands\(client\)\.reader"):
                    await commands(client).get("k")
                assert await client.get("k") is None
            with transaction.scope(()), pytest.raises(HandlerError, match="without await"):
                await commands(redis_client).set("awaited", 1)

    asyncio.run(write())
    assert sorted(redis_client.keys()) == [b"awaited", b"k"]


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c.get("k"),
        lambda c: c.exists("k"),
        lambda c: c.hgetall("k"),
        lambda c: c.xrange("k"),
        lambda c: c.sort("k"),
        lambda c: c.blpop("k", timeout=1),
        lambda c: c.xreadgroup("g", "c", {"k": ">"}),
        lambda c: c.ping(),
        lambda c: c.config_get("x"),
        lambda c: list(c.scan_iter()),
        lambda c: "k" in c,
        lambda c: c.execute_command("WATCH", "k"),
        lambda c: c.execute_command("EXEC"),
        lambda c: c.execute_command("nosuch.command", "k"),
    ],
)
def test_a_read_inside_a_transaction_raises_with_the_advice(redis_client, transaction, read):
    with pytest.raises(HandlerError, match="reader"), transaction.scope(()):
        read(commands(redis_client))


def test_the_reader_reads_what_is_committed(redis_client, transaction):
    redis_client.set("k", "before")
    with transaction.scope(()):
        found = commands(redis_client)
        found.set("k", "after")
        assert found.reader.get("k") == b"before"
    assert redis_client.get("k") == b"after"


@pytest.mark.parametrize(
    "use",
    [
        bool,
        int,
        float,
        len,
        list,
        lambda result: result == 1,
        lambda result: result != b"x",
        lambda result: result > 0,
        lambda result: result[0],
        lambda result: result + 1,
        lambda result: 1 in result,
        str,
        repr,
        bytes,
        lambda result: f"order:{result}",
        lambda result: f"order:{result!r:>20}",
        lambda result: "order:%s" % result,  # noqa: UP031 - so is this
        lambda result: "order:{}".format(result),  # noqa: UP032 - another method is called
        lambda result: f"orders:{[result]}",
    ],
)
def test_the_result_of_a_queued_command_cannot_be_taken_for_one(redis_client, transaction, use):
    with transaction.scope(()):
        taken = commands(redis_client).getdel("k")
        with pytest.raises(HandlerError, match="GETDEL k"):
            use(taken)


def test_sort_that_stores_is_a_write(redis_client, transaction):
    redis_client.rpush("list", 3, 1, 2)
    with transaction.scope(()):
        commands(redis_client).sort("list", store="sorted")
    assert redis_client.lrange("sorted", 0, -1) == [b"1", b"2", b"3"]


def test_a_script_is_sent_whole_and_never_by_its_hash(redis_client, transaction):
    text = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
    with transaction.scope(()):
        commands(redis_client).register_script(text)(keys=["n"], args=[7])
        commands(redis_client).eval(text, 1, "n", 1)
        with pytest.raises(HandlerError, match="eval"):
            commands(redis_client).evalsha("0" * 40, 1, "n")
    assert redis_client.get("n") == b"8"


def test_commands_of_two_words_are_known_by_the_first(redis_client, transaction):
    with transaction.scope(()):
        commands(redis_client).xgroup_create("stream", "group", mkstream=True)
    assert redis_client.xinfo_groups("stream")[0]["name"] == b"group"


def test_a_pipeline_inside_is_part_of_the_transaction(redis_client, transaction):
    with transaction.scope(()):
        with commands(redis_client).pipeline() as pipe:
            pipe.set("a", 1)
            pipe.incr("b")
            pipe.execute()
        assert redis_client.keys() == []
    assert redis_client.mget("a", "b") == [b"1", b"1"]


@pytest.mark.parametrize("what", ["lock", "pubsub", "transaction", "monitor"])
def test_what_needs_a_connection_of_its_own_is_refused(redis_client, transaction, what):
    with transaction.scope(()), pytest.raises(HandlerError, match="plain client"):
        getattr(commands(redis_client), what)()


@pytest.mark.parametrize("value", [None, True, object(), ["list"]])
def test_a_value_that_redis_cannot_take_is_refused_at_once(redis_client, transaction, value):
    with transaction.scope(()), pytest.raises(redis.DataError):
        commands(redis_client).set("k", value)


@pytest.mark.parametrize("value", ["é", b"\x00\xff", 7, 1.5, memoryview(b"view"), bytearray(b"x")])
def test_values_are_written_as_redis_py_writes_them(redis_client, transaction, value):
    try:
        redis_client.set("plain", value)
    except redis.DataError:
        pytest.skip("redis-py does not take it either")
    with transaction.scope(()):
        commands(redis_client).set("queued", value)
    assert redis_client.get("queued") == redis_client.get("plain")


def test_the_encoding_of_the_client_is_kept(redis_client, redis_url):
    client = redis.Redis.from_url(redis_url, encoding="latin-1")
    with client, Transaction(client).scope(()):
        commands(client).set("k", "é")
    assert redis_client.get("k") == b"\xe9"


def test_the_table_names_what_the_server_calls_a_write(redis_client):
    about = redis_client.command()
    for name in WRITES - {"EVAL", "FCALL", "PUBLISH", "SPUBLISH", "XGROUP"}:
        known = about.get(name.lower())
        assert known is None or "write" in known["flags"], name


def test_a_command_that_the_table_lacks_is_looked_up_once(redis_client, transaction, recorded):
    def twice():
        for _ in range(2):
            with transaction.scope(()):
                commands(redis_client).execute_command("SWAPDB", 0, 1)

    seen = recorded(twice)
    assert [command for command in seen if command.startswith("COMMAND")] == ["COMMAND INFO SWAPDB"]
    assert sum(command.startswith("SWAPDB") for command in seen) == 2


def test_a_handle_used_after_its_transaction_ended_raises(redis_client, transaction):
    with transaction.scope(()):
        kept = commands(redis_client)
    for use in (lambda: kept.set("k", 1), lambda: kept.get("k"), lambda: kept.reader):
        with pytest.raises(HandlerError, match="ended"):
            use()
