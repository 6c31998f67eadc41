"""Where the log may live: behind TLS, users, sentinels, in a cluster. And what nobody may see."""

from __future__ import annotations

import pickle
import threading
from traceback import format_exception

import hiredis
import pytest
import redis
from tests.integration.redis.servers import cluster, sentinel, tls_in_front_of
from tests.spark.log.conftest import Log, Query

from conquiet.errors import ConfigError, StoreError
from conquiet.spark.log.connection import connect, disconnect
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.options import Address

SECRET = "pa55word"
RIGHTS = (
    "~orders* ~conquiet:readers:* +xinfo|stream +xrange +scan +type +eval +ping +hset +xgroup"
    " +client +hello +select"
)


def grant(client, rights=RIGHTS):
    client.execute_command("ACL", "SETUSER", "app", "reset", "on", f">{SECRET}", *rights.split())


@pytest.fixture
def user_url(redis_client, redis_url):
    """The URL of a user with no more rights than the page says."""
    grant(redis_client)
    yield redis_url.replace("redis://", f"redis://app:{SECRET}@")
    redis_client.execute_command("ACL", "DELUSER", "app")


def read_all(log):
    """All of a log by a limited query, over and over until nothing is left."""
    query = Query(log, streams="orders*", maxOffsetsPerTrigger=50, readerName="spark")
    found = []
    while numbers := query.batch():
        found.extend(numbers)
    return sorted(found)


def test_a_user_needs_few_rights(plain_log, user_url) -> None:
    plain_log.add("orders", *range(120))
    plain_log.url = user_url
    assert read_all(plain_log) == list(range(120))


@pytest.mark.parametrize("right", ["+ping", "+xrange", "+xinfo|stream"])
def test_a_right_that_is_missing_is_named(plain_log, user_url, right) -> None:
    plain_log.add("orders", 1)
    grant(plain_log.client, RIGHTS.replace(right, ""))
    plain_log.url = user_url
    with pytest.raises(StoreError, match=right.strip("+").partition("|")[0]) as raised:
        read_all(plain_log)
    assert SECRET not in str(raised.value)


def test_a_wrong_password_is_not_repeated(plain_log, user_url) -> None:
    plain_log.url = user_url.replace(SECRET, "wr0ng")
    with pytest.raises(StoreError) as raised:
        read_all(plain_log)
    assert "wr0ng" not in str(raised.value)


def test_through_tls(plain_log, redis_server, tmp_path) -> None:
    plain_log.add("orders", *range(120))
    with tls_in_front_of(redis_server.port, tmp_path) as (port, certificate):
        database = plain_log.url.rpartition("/")[2]
        plain_log.url = f"rediss://127.0.0.1:{port}/{database}?ssl_ca_certs={certificate}"
        assert read_all(plain_log) == list(range(120))
        disconnect()


def test_by_sentinel(tmp_path, private_redis) -> None:
    with (
        redis.Redis.from_url(private_redis.url) as client,
        sentinel(private_redis._binary, tmp_path, private_redis.port) as port,
    ):
        log = Log(None, client, f"redis+sentinel://127.0.0.1:{port}/shop/0", tmp_path)
        log.add("orders", *range(120))
        assert read_all(log) == list(range(120))


def test_in_a_cluster(tmp_path) -> None:
    with cluster() as ports:
        nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
        with redis.RedisCluster(host="127.0.0.1", port=ports[0]) as client:
            log = Log(None, client, f"redis+cluster://{nodes}", tmp_path)
            for number in range(120):
                log.client.xadd(
                    f"orders:{{{number % 5}}}", {"specversion": "1.0", "id": str(number)}
                )
            assert read_all(log) == list(range(120))


def test_a_broken_connection_is_made_again(plain_log) -> None:
    """In the middle of a task: what was read stays read, and nothing is read twice."""
    plain_log.add("orders", *range(5000))
    query = Query(plain_log, {})
    [task] = query.reader.partitions({}, query.reader.latestOffset({}, None))
    batches = query.reader.read(task)
    first = next(batches)
    plain_log.client.client_kill_filter(_type="normal", skipme=True)
    numbers = [*first["event_id"].to_pylist()]
    for batch in batches:
        numbers.extend(batch["event_id"].to_pylist())
    assert [int(number) for number in numbers] == list(range(5000))


# --- secrets ----------------------------------------------------------------------------------


def test_a_url_may_come_from_a_file_or_a_variable(tmp_path, monkeypatch, plain_log) -> None:
    plain_log.add("orders", 1)
    file = tmp_path / "url"
    file.write_text(plain_log.url + "\n")
    monkeypatch.setenv("SHOP_REDIS", plain_log.url)
    plain = {"streams": "orders", "startingOffsets": "earliest"}
    for given in ({"urlFile": str(file)}, {"urlEnv": "SHOP_REDIS"}):
        options = ReadOptions.of(plain | given, streaming=True)
        assert plain_log.url.encode() not in pickle.dumps(options)
        assert options.address.resolve() == plain_log.url
    with pytest.raises(ConfigError, match="SHOP_NOTHING"):
        Address(url_env="SHOP_NOTHING").resolve()
    with pytest.raises(ConfigError, match="No such file"):
        Address(url_file=str(tmp_path / "absent")).resolve()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://app:{}/x@host:6379/0", "%2F"),
        ("redis+sentinel://host:26379,app:{}/x@host/service/0", "%2F"),
        ("redis://app:{}@host:6379/0?sockt_timeout=4", "sockt_timeout"),
        ("http://app:{}@host", "unknown scheme"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_without_its_secret(url, told) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        connect(url.format(SECRET))
    assert SECRET not in "".join(format_exception(error.value))


def test_an_entry_that_is_refused_for_now_lets_no_other_be_read_twice(
    plain_log, monkeypatch
) -> None:
    """As a slot that moves to another node, in the middle of several small streams."""
    for number, stream in enumerate("abc"):
        plain_log.add(stream, number)
    query = Query(plain_log, streams="a,b,c")
    refused = iter([False, True])

    class Reader(hiredis.Reader):
        def gets(self):
            reply = super().gets()
            return redis.ResponseError("TRYAGAIN") if next(refused, False) else reply

    monkeypatch.setattr("conquiet.spark.log.fetch.hiredis.Reader", Reader)
    assert query.batch() == [0, 1, 2]


def test_an_address_shows_no_secret() -> None:
    address = Address(f"redis://app:{SECRET}@host/0")
    assert SECRET not in repr(address)


def test_no_secret_is_in_plan_progress_or_errors(log, user_url, capfd) -> None:
    log.add("orders", *range(3))
    log.url = user_url
    frame = log.read()
    frame.explain(mode="extended")
    plans = [frame._jdf.queryExecution().toString(), capfd.readouterr().out]
    query = log.start(startingOffsets="earliest")
    query.awaitTermination()
    query.explain(extended=True)
    plans += [capfd.readouterr().out, *(progress.json for progress in query.recentProgress)]
    assert sum(progress.numInputRows for progress in query.recentProgress) == 3
    grant(log.client, RIGHTS.replace("+xinfo|stream", ""))
    with pytest.raises(Exception, match="xinfo") as raised:
        log.read().collect()
    plans.append(str(raised.value))
    files = (log.directory / "query" / "checkpoint").rglob("*")
    plans += [file.read_text(errors="replace") for file in files if file.is_file()]
    assert len(plans) > 5
    assert not [plan for plan in plans if SECRET in plan]


def test_a_server_that_restarts_is_waited_for(private_redis, tmp_path) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        log = Log(None, client, private_redis.url, tmp_path)
        log.add("orders", *range(300))
        query = Query(log, maxOffsetsPerTrigger=150, readerName="spark")
        assert query.batch() == list(range(150))
        private_redis.kill()
        back = threading.Timer(0.3, private_redis.start)
        back.start()
        assert query.batch() == list(range(150, 300))
        back.join()


def test_a_value_that_looks_like_the_end_of_an_id_misleads_nobody(plain_log) -> None:
    """The last id of a reply is guessed, to ask for the next one early."""
    plain_log.add("orders", *range(300), ids="{}-1")
    trap = "\n7-7\r\n*12\r\n"
    plain_log.add("orders", *range(300, 6000), ids="{}-1", subject=trap)
    query = Query(plain_log, {})
    assert query.batch() == list(range(6000))
