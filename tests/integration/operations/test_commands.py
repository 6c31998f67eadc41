"""`conquiet queue|streams|dead-letters|trace`, as an operator types them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest
from sqlalchemy import insert
from tests.integration.operations.conftest import numbered

from conquiet.cli import main
from conquiet.message import Message
from conquiet.redis import StreamSink
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from conquiet.sql.schema import outbox_table


@pytest.fixture(autouse=True)
def the_servers_are_named(redis_url, monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_BROKER_URL", redis_url)
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody to ask


@pytest.fixture
def told(capsys):
    """What a command answers, in JSON."""

    def ask(*arguments: str, code: int = 0):
        assert main([*arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def said(capsys):
    """What a command prints, on stdout and stderr."""

    def ask(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(list(arguments)) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return ask


# --- queue ----------------------------------------------------------------------------------


def test_queue_stats_shows_groups_and_who_holds_what(publish, source, told, said) -> None:
    publish(5)
    source(consumer="w-1").read(2, 1.0)
    found = told("queue", "stats", "orders")
    assert (found["ok"], found["length"], found["groups"][0]["lag"]) == (True, 5, 3)
    out, _ = said("queue", "stats", "orders")
    assert "group billing" in out
    assert "alive, idle" in out


def test_queue_stats_fails_if_somebody_who_is_gone_holds_entries(publish, source, told, said):
    publish(1)
    source(consumer="w-1", lease=0.001).read(1, 1.0)
    assert told("queue", "stats", "orders", code=1)["ok"] is False
    out, err = said("queue", "stats", "orders", code=1)
    assert "gone, idle" in out
    assert "conquiet queue claim" in err


def test_queue_pending_and_claim(publish, source, told, said) -> None:
    publish(2)
    source(consumer="w-1").read(2, 1.0)
    first, _ = told("queue", "pending", "orders", "billing")
    assert (first["consumer"], first["deliveries"]) == ("w-1", 1)
    out, _ = said("queue", "pending", "orders", "billing")
    assert first["id"] in out
    out, _ = said("queue", "pending", "orders", "billing", "--min-idle", "1h")
    assert "nothing is pending" in out
    claim = ("queue", "claim", "orders", "billing", "--min-idle", "0")
    assert told(*claim, "--dry-run")["ids"] == told(*claim)["ids"]
    out, _ = said(*claim, "--to", "w-2", first["id"])
    assert "1 entries given to w-2" in out
    assert told("queue", "pending", "orders", "billing")[0]["consumer"] == "w-2"
    _, err = said(*claim, "1-1", code=1)
    assert "1-1 is not pending" in err


def test_queue_peek(publish, told, said, redis_client) -> None:
    publish(3)
    assert [entry["event_id"] for entry in told("queue", "peek", "orders", "--limit", "2")] == [
        *("m-0", "m-1")
    ]
    out, _ = said("queue", "peek", "orders", "--newest", "--limit", "1", "--whole")
    assert "m-2" in out
    assert "/shop" in out
    redis_client.xtrim("orders", 0)
    assert said("queue", "peek", "orders")[0] == "no entries\n"


# --- streams --------------------------------------------------------------------------------


def test_streams_list_and_lag(publish, source, told, said) -> None:
    assert said("streams", "list")[0] == said("streams", "lag")[0] == "no streams\n"
    publish(3)
    publish(1, "payments")
    assert [item["name"] for item in told("streams", "list")] == ["orders", "payments"]
    assert [item["name"] for item in told("streams", "list", "pay*")] == ["payments"]
    head, *rows = said("streams", "list")[0].splitlines()
    assert head.split()[:2] == ["stream", "entries"]
    assert [row.split()[:2] for row in rows] == [["orders", "3"], ["payments", "1"]]
    assert said("streams", "lag")[0] == "no groups or readers\n"
    source()
    assert told("streams", "lag", "--max", "3")["lags"][0]["lag"] == 3
    assert told("streams", "lag", "--max", "2", code=1)["ok"] is False
    assert told("streams", "lag", "--max", "0", code=1)["ok"] is False
    with pytest.raises(SystemExit, match="2"):
        said("streams", "lag", "--max", "-1")
    assert "group billing" in said("streams", "lag")[0]
    assert "no stream matches 'typo*'" in said("streams", "lag", "typo*", code=1)[1]


def test_streams_prune_removes_consumers_that_are_idle_and_hold_nothing(
    publish, source, told, said, redis_client
) -> None:
    publish(1)
    source(consumer="holds").read(1, 1.0)
    for group in ("billing", "mail"):
        if group != "billing":
            redis_client.xgroup_create("orders", group)
        redis_client.xgroup_createconsumer("orders", group, "crashed")
    assert told("streams", "prune", "--yes") == []
    would = told("streams", "prune", "ord*", "--idle", "0s", "--dry-run")
    assert [(item["group"], item["name"]) for item in would] == [
        ("billing", "crashed"),
        ("mail", "crashed"),
    ]
    _, err = said("streams", "prune", "--idle", "0s", code=2)
    assert "--yes" in err
    out, _ = said("streams", "prune", "ord*", "--idle", "0s", "--yes")
    assert "2 idle consumers removed" in out
    names = [row["name"] for row in redis_client.xinfo_consumers("orders", "billing")]
    assert (names, redis_client.xinfo_consumers("orders", "mail")) == ([b"holds"], [])


def test_streams_trim_deletes_only_what_all_are_done_with(
    publish, source, told, said, redis_client
) -> None:
    publish(5)
    for message in source().read(3, 1.0):
        message.ack()
    trim = ("streams", "trim", "orders", "--exact")
    assert "would be deleted; the rest is kept: group billing" in said(*trim, "--dry-run")[0]
    _, err = said(*trim, code=2)
    assert "this would delete from orders entries that every group" in err
    assert redis_client.xlen("orders") == 5
    [done] = told(*trim, "--yes")
    assert (done["removed"], redis_client.xlen("orders")) == (3, 2)
    said("streams", "trim", "orders", "nowhere", "--yes", code=1)


# --- lists of hostile texts -----------------------------------------------------------------

FORGED = "m-1\n1700000000000-0  2023-11-14T22:13:20.000Z  paid  m-2\u2028\x85\u202e\u200f\r\x1b[2J"


@pytest.fixture
def forged(redis_client) -> None:
    """An entry and a dead letter whose type and id end a line and begin another one."""
    event = {"specversion": "1.0", "id": FORGED, "type": FORGED, "source": FORGED, "data": FORGED}
    redis_client.xadd("orders", event)
    redis_client.xadd("dead", {**event, "deadreason": FORGED, "deadattempts": "1"})
    redis_client.xadd(f"dead:{FORGED}", {**event, "deadreason": FORGED})


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("queue peek orders", 2),
        ("queue peek orders --whole", None),
        ("dead-letters list dead", 2),
        ("dead-letters list", 3),
        ("dead-letters show dead ID", None),
        ("streams list", None),
        ("trace ID --full", 3),
    ],
)
def test_a_line_break_in_an_event_forges_no_row(forged, said, command, lines) -> None:
    out, err = said(*(FORGED if word == "ID" else word for word in command.split()))
    shown = (out + err).splitlines()
    assert lines in (None, len(shown)), shown
    assert not any(line.startswith("1700000000000-0") for line in shown)
    assert not {"\r", "\x1b", "\x85", "\u2028", "\u202e", "\u200f"} & set(out + err)


# --- dead letters ---------------------------------------------------------------------------


def test_dead_letters_are_listed_and_shown(bury, told, said) -> None:
    assert "no stream holds dead letters" in said("dead-letters", "list")[0]
    bury(2)
    assert told("dead-letters", "list") == [{"stream": "dead", "letters": 2}]
    assert said("dead-letters", "list")[0].split() == ["stream", "letters", "dead", "2"]
    out, _ = said("dead-letters", "list", "dead", "--type", "so*", "--since", "1h")
    assert out.count("ValueError: no such customer") == 2
    assert told("dead-letters", "list", "dead", "--error", "timeout") == []
    assert "no dead letters" in said("dead-letters", "list", "dead", "--until", "2000-01-01")[0]
    out, _ = said("dead-letters", "show", "dead", "m-1")
    assert "ValueError: no such customer" in out
    assert '  {\n    "n": 1\n  }\n' in out
    assert told("dead-letters", "show", "dead", "m-1")["attempts"] == 1


def test_dead_letters_are_replayed_by_filter_after_a_dry_run(bury, told, said, redis_client):
    bury(3)
    replay = ("dead-letters", "replay", "dead")
    _, err = said(*replay, code=2)
    assert "name the letters" in err
    said(*replay, "--all", "--error", "x", code=2)
    assert "3 dead letters would be replayed" in said(*replay, "--error", "no such", "--dry-run")[0]
    assert redis_client.xlen("dead") == 3
    assert len(told(*replay, "m-0")["done"]) == 1
    _, err = said(*replay, "m-0", code=1)
    assert "no letter has such an id" in err
    redis_client.set("text", "x")
    _, err = said(*replay, "--all", "--to", "text", code=1)
    assert err.count("kept") == 2
    assert "2 dead letters replayed" in said(*replay, "--all")[0]
    assert (redis_client.xlen("dead"), redis_client.xlen("orders")) == (0, 6)


def test_dead_letters_are_dropped_only_with_a_yes(bury, told, said, redis_client) -> None:
    bury(2)
    drop = ("dead-letters", "drop", "dead", "--type", "sold")
    _, err = said(*drop, code=2)
    assert "this would delete 2 dead letters of stream 'dead' for good; --yes" in err
    assert "would be dropped" in said(*drop, "--dry-run")[0]
    assert redis_client.xlen("dead") == 2
    assert len(told(*drop, "--yes")["done"]) == 2
    assert redis_client.xlen("dead") == 0


def test_dead_letters_of_a_file_go_to_a_stream(tmp_path, told, said, redis_client) -> None:
    path = tmp_path / "failed.jsonl"
    line = '{"specversion":"1.0","id":"e-1","type":"sold","source":"/","deadreason":"no","data":1}'
    path.write_text(f"{line}\n")
    assert told("dead-letters", "list", f"file:{path}")[0]["event_id"] == "e-1"
    replay = ("dead-letters", "replay", f"file:{path}", "--all")
    _, err = said(*replay, code=1)
    assert "name the sink with --to" in err
    said(*replay, "--to", f"file:{path}", code=2)
    assert len(told(*replay, "--to", "redis:?stream=orders")["done"]) == 1
    assert redis_client.xlen("orders") == 1
    assert told("dead-letters", "list", f"file:{path}") == []
    said("dead-letters", "list", "file:/nonexistent/x", code=1)


def test_a_place_that_is_not_there_yet_holds_none_and_says_so(said) -> None:
    out, err = said("dead-letters", "list", "nowhere")
    assert "no dead letters" in out
    assert "stream 'nowhere': does not exist (yet)" in err


STEERING = "\x1b]0;owned\x07\x9b31m"


def test_what_a_message_holds_does_not_steer_the_terminal(redis_client, said, told) -> None:
    attributes = {"id": f"e{STEERING}", "type": f"t{STEERING}", "source": "/"}
    about = {"deadreason": f"r{STEERING}", "deadstream": "orders"}
    data = STEERING.encode()
    StreamSink(redis_client, "dead").publish([Message(data, {**attributes, **about})])
    StreamSink(redis_client, f"orders{STEERING}").publish([Message(data, attributes)])
    for command in (
        ("dead-letters", "list", "dead"),
        ("dead-letters", "show", "dead", attributes["id"]),
        ("dead-letters", "replay", "dead", "--all", "--to", "dead"),
        ("queue", "peek", "dead", "--whole"),
        ("streams", "list"),
        ("streams", "list", "--json"),
        ("trace", attributes["id"], "--full"),
        ("queue", "stats", f"nowhere{STEERING}"),
    ):
        out, err = said(*command, code=int(command[-1].startswith("nowhere")))
        assert not {"\x1b", "\x07", "\x9b"} & set(out + err), command


# --- trace ----------------------------------------------------------------------------------


def test_trace_follows_an_event(sqlite_url, redis_client, source, told, said) -> None:
    schema.init(sqlite_url)
    engine = make_engine(sqlite_url)
    [message] = numbered(1)
    StreamSink(redis_client, "orders").publish([message])
    source(consumer="w-1").read(1, 1.0)
    with engine.begin() as connection:
        row = {
            "topic": "orders", "event_type": "sold", "event_id": "m-0", "data": b"",
            "content_type": "text/plain", "attributes": message.attributes, "attempts": 2,
            "published_at": datetime.now(UTC), "last_error": "Refused: once",
        }  # fmt: skip
        connection.execute(insert(outbox_table()).values(**row))
    engine.dispose()
    found = told("trace", "m-0", "--database", sqlite_url)
    assert found["logged"][0]["takers"][0]["consumer"] == "w-1"
    out, _ = said("trace", "m-0", "--database", sqlite_url)
    assert "outbox   outbox row 1: published, sold" in out
    assert "billing: in flight with w-1" in out
    out, err = said("trace", "nothing", code=1)
    assert "no trace of 'nothing'" in out
    assert "--full" in err


# --- what goes wrong is one line ----------------------------------------------------------------

COMMANDS = [
    ("queue", "stats", "orders"),
    ("queue", "pending", "orders", "billing"),
    ("queue", "claim", "orders", "billing"),
    ("queue", "peek", "orders"),
    ("streams", "trim", "orders", "--yes"),
    ("dead-letters", "list", "orders"),
    ("dead-letters", "show", "orders", "e-1"),
    ("dead-letters", "replay", "orders", "--all"),
    ("dead-letters", "drop", "orders", "--all", "--yes"),
]
ids = [" ".join(command[:2]) for command in COMMANDS]


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_a_key_that_is_no_stream_is_told_in_one_line(command, said, redis_client) -> None:
    redis_client.set("orders", "text")
    _, err = said(*command, code=1)
    [line] = err.splitlines()
    assert "this key does not hold a stream" in line


@pytest.mark.parametrize("command", [*COMMANDS[:5], COMMANDS[6]], ids=[*ids[:5], ids[6]])
def test_what_is_not_there_is_told_in_one_line(command, said) -> None:
    _, err = said(*command, code=1)
    [line] = err.splitlines()
    assert "does not exist" in line or "no dead letter" in line


def test_a_group_that_is_not_there_is_told_in_one_line(publish, said) -> None:
    publish(1)
    _, err = said("queue", "pending", "orders", "nobody", code=1)
    assert len(err.splitlines()) == 1
    assert "group 'nobody' of stream 'orders': does not exist" in err


EVERY = [*COMMANDS, ("streams", "list"), ("streams", "lag"), ("dead-letters", "list")]
SERVERS = {
    "out of reach": ("redis://:top-secret@127.0.0.1:1/0", 1, "is it running"),
    "no URL": ("nonsense", 2, "is not a URL such as redis://HOST:PORT/0"),
    "of something else": ("http://h", 2, "unknown scheme; write redis://"),
    "password in pieces": ("redis://u:top-secret/x@127.0.0.1/0", 2, "percent-encode"),
    "a setting nobody knows": ("redis://127.0.0.1/0?colour=blue", 2, "colour"),
    "a sentinel": ("sentinel://h", 2, "name the master itself"),
}


@pytest.mark.parametrize(
    ("command", "what"),
    [(command, "out of reach") for command in EVERY] + [(EVERY[-1], what) for what in SERVERS],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_server_that_cannot_be_used_is_told_in_one_line(command, what, said) -> None:
    url, code, says = SERVERS[what]
    _, err = said(*command, "--broker", url, code=code)
    [line] = err.splitlines()
    assert says in line
    assert "top-secret" not in line


def test_a_wrong_password_is_told_and_not_shown(private_redis, said) -> None:
    import redis

    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "right-one")
    url = private_redis.url.replace("redis://", "redis://:top-secret@", 1)
    _, err = said("streams", "list", "--broker", url, code=1)
    [line] = err.splitlines()
    assert "correct user and password in --broker" in line
    assert "top-secret" not in line
    _, err = said("trace", "e-1", "--broker", url, code=1)
    assert "in --broker" in err
