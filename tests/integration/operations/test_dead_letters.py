"""Dead letters of streams, files and queues: found, shown, replayed, dropped."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from tests import zygote
from tests.integration.operations.conftest import numbered

from conquiet.errors import NotFound, StoreError
from conquiet.jsonlines import LinesSink, LinesSource
from conquiet.middleware import DeadLetter
from conquiet.operations.dead_letters import (
    FileLetters,
    Filter,
    drop,
    find,
    list_streams,
    open_letters,
    replay,
    show,
)
from conquiet.redis import Outbox, OutboxSource, StreamSink


@pytest.fixture
def letters(redis_client):
    return open_letters("dead", redis_client)


def test_a_letter_tells_why_it_died_and_where_it_came_from(redis_client, bury, letters) -> None:
    bury()
    [letter] = find(letters)
    assert (letter.event_id, letter.event_type, letter.source) == ("m-0", "sold", "/shop")
    assert letter.reason == "ValueError: no such customer"
    assert "Traceback" in letter.traceback or "ValueError" in letter.traceback
    assert (letter.attempts, letter.topic, letter.stream) == (1, "orders", "orders")
    assert letter.entry == redis_client.xrange("orders")[0][0].decode()
    assert letter.data == '{"n": 0}'
    assert set(letter.attributes) == {"id", "type", "source", "specversion"}
    assert show(letters, letter.id) == show(letters, "m-0") == letter
    assert find(letters, Filter((letter.id, "5-1"))) == [letter]
    with pytest.raises(NotFound, match="no dead letter 'm-9'"):
        show(letters, "m-9")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), 3),
        (Filter(type="sold"), 3),
        (Filter(type="s*", source="/sh?p"), 3),
        (Filter(type="bought"), 0),
        (Filter(error="NO SUCH"), 3),
        (Filter(error="timeout"), 0),
        (Filter(("m-1",)), 1),
        (Filter(("m-1", "m-2"), error="customer"), 2),
        (Filter(since=datetime.now(UTC) - timedelta(days=1)), 3),
        (Filter(until=datetime.now(UTC) - timedelta(days=1)), 0),
        (Filter(since=datetime.now(UTC) + timedelta(days=1)), 0),
    ],
)
def test_letters_are_found_by_what_they_say(bury, letters, wanted, found) -> None:
    bury(3)
    assert len(find(letters, wanted)) == found
    assert len(find(letters, wanted, limit=1)) == min(found, 1)


def test_a_long_list_of_letters_is_found_page_by_page(bury, letters) -> None:
    bury(5)
    seen, after = [], ""
    while page := find(letters, Filter(after=after), limit=2):
        seen += [letter.event_id for letter in page]
        after = page[-1].id
    assert seen == [f"m-{n}" for n in range(5)]


def test_a_replay_gives_the_message_back_as_it_was(redis_client, bury, letters, source) -> None:
    bury(2, subject="c-1")
    tried = replay(letters, Filter(("m-1",)), dry_run=True)
    assert (len(tried.done), redis_client.xlen("dead")) == (1, 2)
    done = replay(letters, Filter(("m-1",)))
    assert done.done == tried.done
    assert done.failed == ()
    assert [letter.event_id for letter in find(letters)] == ["m-0"]
    *_, last = redis_client.xrange("orders")
    assert last[1] == redis_client.xrange("orders")[1][1]
    assert replay(letters, Filter(("m-1",))).done == ()


def test_what_dies_again_during_a_replay_is_not_replayed_for_ever(
    redis_client, bury, letters
) -> None:
    bury(3)

    def dies_again(_: int) -> None:
        redis_client.xadd("dead", redis_client.xrange("dead", count=1)[0][1])

    assert len(replay(letters, Filter(), limit=50, progress=dies_again).done) <= 3


def test_letters_of_the_middleware_go_back_to_their_topic(redis_client, letters) -> None:
    errors = iter([ValueError("no")] * 3)
    sink = StreamSink(redis_client, "dead")
    bury = DeadLetter(sink, max_attempts=1, topic="dead")(
        lambda batch: [next(errors) for _ in batch]
    )
    some = numbered(3, partitionkey="c-7")
    for message, topic in zip(some, ("orders", "nowhere", None), strict=True):
        message.topic = topic
    bury(some)
    for stream in ("orders:{0}", "orders:{1}"):
        redis_client.xgroup_create(stream, "billing", mkstream=True)
    assert [letter.traceback for letter in find(letters)] == ["ValueError: no\n"] * 3
    outcome = replay(letters, Filter())
    assert len(outcome.done) == 1
    assert "has no stream here" in outcome.failed[0].why
    assert "its origin is unknown" in outcome.failed[1].why
    assert redis_client.xlen("orders:{0}") + redis_client.xlen("orders:{1}") == 1
    assert len(replay(letters, Filter(), to="elsewhere").done) == 2
    assert redis_client.xlen("dead") == 0


def test_an_event_of_an_outbox_goes_back_into_it_with_its_topic(redis_client, letters) -> None:
    with redis_client.pipeline() as pipeline:
        Outbox("orders", "outbox", source="/shop").add(pipeline, numbered(1))
        pipeline.execute()
    before = redis_client.xrange("outbox")[0][1]
    source = OutboxSource(redis_client, "outbox", max_attempts=1, dead_letters="dead")
    while not source.dead:
        for message in source.read(1, 1.0):
            message.nack(ValueError("no"))
    source.close()
    assert find(letters)[0].topic == "orders"
    assert len(replay(letters, Filter()).done) == 1
    assert redis_client.xrange("outbox")[0][1] == before


def test_an_entry_that_could_not_be_read_comes_back_field_by_field(
    redis_client, letters, source
) -> None:
    fields = {b"colour": b"blue", b"raw": b"\xff"}
    redis_client.xadd("orders", fields)
    reader = source(max_attempts=1, dead_letters="dead")
    while not reader.dead:
        reader.read(1, 0.05)
    assert len(replay(letters, Filter(), to="mended").done) == 1
    assert redis_client.xrange("mended")[0][1] == fields


def test_where_a_letter_cannot_go_it_stays(redis_client, bury, letters) -> None:
    bury()
    redis_client.set("text", "no stream")
    outcome = replay(letters, Filter(), to="text")
    assert outcome.done == ()
    assert "does not hold a stream" in outcome.failed[0].why
    assert redis_client.xlen("dead") == 1


REPLAY = """
import os, sys, redis
from conquiet.operations.dead_letters import Filter, open_letters, replay
with redis.Redis.from_url(sys.argv[1]) as client:
    replay(open_letters("dead", client), Filter(), progress=lambda done: print(done, flush=True))
"""


def test_a_replay_that_is_killed_has_lost_nothing_and_sent_nothing_twice(
    redis_client, redis_url, letters
) -> None:
    about = {"deadreason": "no", "deadstream": "orders", "deadtopic": "orders"}
    StreamSink(redis_client, "dead").publish(numbered(3_000, **about))
    process = zygote.Popen(
        [sys.executable, "-c", REPLAY, redis_url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 100:
            process.kill()
            break
    process.stdout.close()
    assert process.wait(30) == -9
    left = [fields[b"id"] for _, fields in redis_client.xrange("dead")]
    sent = [fields[b"id"] for _, fields in redis_client.xrange("orders")]
    assert 100 <= len(sent) < 3_000
    assert sorted(left + sent) == sorted(b"m-%d" % n for n in range(3_000))
    replay(letters, Filter())
    assert redis_client.xlen("orders") == 3_000


def test_drop_deletes_what_is_wanted_and_leaves_the_rest(redis_client, bury, letters) -> None:
    bury(3)
    assert len(drop(letters, Filter(("m-1",)), dry_run=True).done) == 1
    assert len(drop(letters, Filter(("m-1",))).done) == 1
    assert [letter.event_id for letter in find(letters)] == ["m-0", "m-2"]
    assert drop(letters, Filter(), among={"1-1"}).done == ()


def test_streams_with_letters_are_found_among_others(redis_client, bury, publish) -> None:
    assert list_streams(redis_client) == {}
    bury(2)
    publish(1, "payments")
    assert list_streams(redis_client) == {"dead": 2}


# --- files ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    lines = [
        json.dumps({"specversion": "1.0", "id": f"m-{n}", "type": "sold", "source": "/shop"})
        for n in range(3)
    ]
    path = tmp_path / "failed.jsonl"
    with path.open("wb") as out:
        source = LinesSource(
            io.BytesIO("\n".join([*lines, "what?"]).encode()), LinesSink(out), max_attempts=1
        )
        for message in source.read(10, 1.0):
            message.nack(ValueError("no such customer"))
        source.close()
    return path


def test_letters_of_a_file_are_replayed_and_their_lines_blanked(file, redis_client) -> None:
    letters = FileLetters(file, StreamSink(redis_client, "orders"))
    assert [letter.event_id for letter in find(letters, Filter(type="sold"))] == [
        *("m-0", "m-1", "m-2")
    ]
    before = file.read_bytes()
    with file.open("ab") as worker:  # which has it open, and goes on appending
        outcome = replay(letters, Filter(("m-1",)))
        worker.write(b'{"specversion":"1.0","id":"x","type":"t","source":"/","deadreason":"no"}\n')
    assert len(outcome.done) == 1
    [(_, fields)] = redis_client.xrange("orders")
    assert fields == {
        b"specversion": b"1.0", b"id": b"m-1", b"type": b"sold", b"source": b"/shop", b"data": b""
    }  # fmt: skip
    assert len(file.read_bytes().splitlines()) == len(before.splitlines()) + 1
    assert [letter.event_id for letter in find(letters)][-1] == "x"
    assert show(letters, "x").reason == "no"
    assert len(drop(letters, Filter(("m-0", "x"))).done) == 2
    assert [letter.event_id for letter in find(letters, Filter(type="sold"))] == ["m-2"]


def test_a_replay_of_a_file_that_is_killed_keeps_what_it_had_not_blanked(file, tmp_path) -> None:
    code = """
import os, sys
from conquiet.jsonlines import LinesSink
from conquiet.operations.dead_letters import FileLetters, Filter, replay

class Deadly(LinesSink):
    def publish_each(self, messages):
        super().publish_each(messages)
        if messages[0].id == "m-1":
            os._exit(9)  # published, and not blanked yet
        return [None]

replay(FileLetters(sys.argv[1], Deadly(open(sys.argv[2], "ab"))), Filter(type="sold"))
"""
    sent = tmp_path / "sent.jsonl"
    run = zygote.run([sys.executable, "-c", code, str(file), str(sent)], timeout=60)
    assert run.returncode == 9
    assert [json.loads(line)["id"] for line in sent.read_text().splitlines()] == ["m-0", "m-1"]
    left = [letter.event_id for letter in find(FileLetters(file), Filter(type="sold"))]
    assert left == ["m-1", "m-2"]


def test_a_file_without_a_place_to_replay_to_keeps_its_letters(file) -> None:
    letters = FileLetters(file)
    outcome = replay(letters, Filter(("m-1",)))
    assert (outcome.done, "name the sink" in outcome.failed[0].why) == ((), True)
    with pytest.raises(NotFound, match="does not exist"):
        find(FileLetters(file.with_name("none")))
    with pytest.raises(StoreError, match="Is a directory"):
        find(FileLetters(file.parent))


# --- queues of Kombu --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["rejected", "never acked", "undecodable"])
def test_a_replayed_message_of_kombu_keeps_its_priority(redis_client, redis_url, end) -> None:
    from kombu import Connection, Producer, Queue

    from conquiet.kombu.layout import BACK, GROUP

    broker = redis_url.replace("redis://", "redis-streams://", 1)
    stream = "conquiet:kombu:q:6:tasks"
    with Connection(broker, transport_options={"delivery_limit": 1}) as connection:
        queue = Queue("tasks")(connection.default_channel)
        queue.declare()
        Producer(connection.default_channel).publish({"n": 1}, routing_key="tasks", priority=7)
        assert redis_client.xlen(stream) == 1
        if end == "rejected":
            queue.get().requeue()
        elif end == "undecodable":
            redis_client.delete(stream)
            redis_client.xadd(stream, {"m": "no JSON"})
        else:  # given back, as after the death of its consumer
            redis_client.xgroup_create(stream, GROUP, "0")
            redis_client.xreadgroup(GROUP, BACK, {stream: ">"})
        assert queue.get() is None
    letters = open_letters("kombu:tasks", redis_client)
    assert len(replay(letters, Filter()).done) == 1
    assert redis_client.xlen(stream) == 1


def test_letters_of_a_queue_of_kombu_go_back_into_it(redis_client, redis_url) -> None:
    from kombu import Connection, Producer, Queue

    import conquiet.kombu  # noqa: F401 - registers the scheme
    from conquiet.kombu import inspection

    broker = redis_url.replace("redis://", "redis-streams://", 1)
    with Connection(broker, transport_options={"delivery_limit": 1}) as connection:
        queue = Queue("tasks")(connection.default_channel)
        queue.declare()
        headers = {"id": "t-1", "task": "app.bill"}
        Producer(connection.default_channel).publish({"n": 1}, routing_key="tasks", headers=headers)
        queue.get().requeue()
    letters = open_letters("kombu:tasks", redis_client)
    [letter] = find(letters, Filter(type="app.*"))
    assert (letter.event_id, letter.event_type, letter.topic) == ("t-1", "app.bill", "tasks")
    assert len(replay(letters, Filter(("t-1",))).done) == 1
    [info] = inspection.queues(redis_client)
    assert (info.ready, info.dead_letters) == (1, 0)
    with Connection(broker) as connection:
        message = Queue("tasks")(connection.default_channel).get()
        assert message.payload == {"n": 1}
        message.ack()
