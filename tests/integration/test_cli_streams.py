"""`conquiet streams`, `dead-letters` and `doctor` over a real Redis, as monitoring uses them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.cli import main
from conquiet.operations import history
from conquiet.operations.streams import describe
from conquiet.redis import StreamSink, StreamSource


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


def test_a_stream_that_does_not_exist_is_a_failure(redis_url: str, capsys: Any) -> None:
    for verb in ("list", "lag"):
        assert main(["streams", verb, "nothing", "--broker", redis_url]) == 1
        assert "no stream matches 'nothing'" in capsys.readouterr().err


def test_streams_of_celery_and_of_retries_are_folded_away(
    client: Any, redis_url: str, capsys: Any
) -> None:
    for name in ("orders", "conquiet:kombu:q:3:celery", "conquiet:again:{orders}:billing"):
        client.xadd(name, {"a": "1"})
    assert main(["streams", "list", "--broker", redis_url]) == 0
    said = capsys.readouterr()
    assert "orders" in said.out
    assert "conquiet:" not in said.out
    assert "2 internal streams are left out" in said.err
    assert main(["streams", "list", "--broker", redis_url, "--all", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["streams", "list", "conquiet:kombu:*", "--broker", redis_url]) == 0
    assert "conquiet:kombu:q:3:celery" in capsys.readouterr().out


def test_a_dead_letter_names_its_handler_and_shows_data_to_read(
    client: Any, redis_url: str, capsys: Any
) -> None:
    router = Router()

    @router.raw(name="charge card")
    def charge(message: Message[bytes]) -> None:
        raise ValueError("declined")

    source = StreamSource(client, "orders", "billing", max_attempts=1, dead_letters="dead")
    attributes = {"id": "1", "type": "pay", "source": "/shop"}
    StreamSink(client, "orders").publish([Message(b'{"amount":7,"to":"Ada"}', attributes)])
    worker = Worker(source, router)
    worker.start()
    eventually(lambda: client.xlen("dead") == 1)
    worker.stop()
    assert main(["dead-letters", "list", "dead", "--broker", redis_url]) == 0
    assert "charge card" in capsys.readouterr().out
    assert main(["dead-letters", "show", "dead", "1", "--broker", redis_url]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^handler +charge card$", said, re.M)
    assert '    "amount": 7,\n' in said


@pytest.mark.parametrize(
    ("settings", "status", "says"),
    [
        ({"appendonly": "no"}, "notice", "appendonly no: after a crash nothing is left"),
        ({"appendonly": "yes", "appendfsync": "no"}, "notice", "up to half a minute"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "ok", "up to two seconds"),
        ({"appendonly": "yes", "appendfsync": "always"}, "ok", "loses nothing"),
    ],
)
def test_doctor_says_what_a_crash_of_redis_loses(
    private_redis: Any, settings: dict[str, str], status: str, says: str, capsys: Any
) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("save", "")
        for name, value in settings.items():
            client.config_set(name, value)
    assert main(["doctor", "--json", "--broker", private_redis.url]) == 0
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["redis durability"]["status"] == status
    assert says in checks["redis durability"]["detail"]


@pytest.mark.parametrize(
    ("policy", "says"),
    [("allkeys-lru", "events are lost"), ("volatile-ttl", "take effect twice"), ("noeviction", "")],
)
def test_doctor_says_what_eviction_deletes(
    private_redis: Any, policy: str, says: str, capsys: Any
) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", policy)
    main(["doctor", "--json", "--broker", private_redis.url])
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    if not says:
        assert "redis memory" not in checks
    else:
        assert checks["redis memory"]["status"] == "notice"
        assert says in checks["redis memory"]["detail"]


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ("", "", "fsync"),
        ("-csynchronous_commit=off", "notice", "a crash loses the last commits"),
    ],
)
def test_doctor_says_what_a_crash_of_postgresql_loses(
    database_url: str, options: str, status: str, says: str, capsys: Any
) -> None:
    from sqlalchemy import create_engine, make_url

    made = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    with made.connect() as connection:
        is_safe = connection.exec_driver_sql("SHOW fsync").scalar_one() == "on"
    made.dispose()
    url = make_url(database_url)
    url = url.update_query_dict({"options": options}) if options else url
    main(["doctor", "--json", "--database", url.render_as_string(hide_password=False)])
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    found = checks["database durability"]
    if is_safe and options:
        assert (found["status"], says in found["detail"]) == (status, True)
    else:
        assert found["status"] == ("ok" if is_safe else "notice")
        assert "fsync" in found["detail"]


def test_doctor_says_what_a_crash_of_sqlite_loses(tmp_path: Any, capsys: Any) -> None:
    main(["doctor", "--json", "--database", f"sqlite:///{tmp_path / 'shop.db'}"])
    checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert "journal_mode" in checks["database durability"]["detail"]


def test_top_shows_handlers_groups_queues_and_processes(
    client: Any, redis_url: str, capsys: Any
) -> None:
    look = ["top", "--broker", redis_url]
    assert main(look) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no handler has reported",
        "",
        "0 processes alive",
    ]
    StreamSink(client, "orders").publish(
        [Message(b"{}", {"id": f"o-{n}", "type": "place", "source": "/w"}) for n in range(30)]
    )
    router = Router()

    @router.raw(type="place", name="place_order")
    def place(message: Message[bytes]) -> None:
        if message.id == "o-7":
            raise ValueError("no")

    worker = Worker(
        StreamSource(client, "orders", "billing", "box-7", max_attempts=1), router, batch_size=5
    )
    recorder = history.record([worker])
    assert recorder is not None
    worker.start()
    eventually(lambda: worker.health().handled >= 29, timeout=30)
    eventually(lambda: client.xlen("orders:dead") == 1, timeout=30)
    worker.stop()
    recorder.write()
    client.xgroup_create("conquiet:kombu:q:0:mail", "conquiet", "0", mkstream=True)
    client.xadd("conquiet:kombu:q:0:mail", {"m": "{}"})
    assert main([*look, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [handler] = found["handlers"]
    assert (handler["name"], handler["type"], handler["errors"]) == ("place_order", "place", 1)
    assert handler["dead"] == 1
    groups = {one["name"]: (one["unread"], one["alive"]) for one in found["groups"]}
    assert groups["queue mail"] == (1, 0)
    assert groups["billing"][0] == 0
    assert [(one["name"], one["alive"]) for one in found["processes"]] == [("box-7", True)]
    assert main([*look, "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"place_order +place +0\.\d +<1 +", out)
    assert "queue mail" in out
    assert "billing" not in out
    assert "1 process alive  box-7 (worker)" in out


def test_top_without_a_store_or_with_one_that_is_away(
    redis_url: str, tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    for name in ("CONQUIET_BROKER_URL", "CONQUIET_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert main(["top"]) == 2
    assert main(["top", "--broker", "redis://localhost:1"]) == 1
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "shop.db").touch()
    capsys.readouterr()
    assert main(["top", "--broker", redis_url, "--database", database]) == 1
    said = capsys.readouterr()
    assert "0 processes alive" in said.out  # the other store is shown all the same
    assert "outbox_history" in said.err


def test_a_group_of_a_stream_is_removed_after_a_question_that_says_what_is_lost(
    client: Any, redis_url: str, capsys: Any
) -> None:
    StreamSink(client, "orders").publish(
        [Message(b"{}", {"id": f"o-{n}", "type": "place", "source": "/w"}) for n in range(3)]
    )
    source = StreamSource(client, "orders", "billing", "box-7", lease=0.1)
    assert len(source.read(2, 5.0)) == 2
    remove = ["streams", "remove-group", "orders", "billing", "--broker", redis_url]
    assert main(remove) == 2
    assert "2 entries in flight and 1 unread; --yes" in capsys.readouterr().err
    source.close()
    eventually(lambda: describe(client, "orders").groups[0].alive == 0, timeout=30)
    assert main([*remove, "--yes"]) == 0
    assert "group billing of stream orders removed" in capsys.readouterr().out
    assert client.xinfo_groups("orders") == []
    assert client.xlen("orders") == 3
    assert main([*remove, "--yes"]) == 1
    assert "has no group 'billing'" in capsys.readouterr().err
