"""What real processes do, killed at random, is what the models allow."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import zygote
from tests.models.actor import GROUP, LEASE, STREAM, TOPIC
from tests.models.checker import Label, NotAllowed, Operation, replay
from tests.models.redis_inbox import RedisInbox
from tests.models.trace import cut, read_calls, replay_key, replay_trace

from conquiet import Message
from conquiet.sql import Outbox, engine, schema
from conquiet.testing import eventually

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def actors(*given: str):
    """Run two processes, which `kill` replaces."""
    command = [sys.executable, str(Path(__file__).with_name("actor.py")), *given]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}}
    running = [zygote.Popen(command, **options) for _ in range(2)]

    def kill(place: int) -> None:
        running[place].kill()
        running[place].wait()
        running[place] = zygote.Popen(command, **options)

    try:
        yield kill
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_workers_over_redis_take_the_steps_of_the_model(redis_client, redis_url, tmp_path):
    trace = tmp_path / "trace.jsonl"
    redis_client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    chance = random.Random(5)

    def send(numbers: range) -> None:
        for number in numbers:
            about = {"specversion": "1.0", "type": "place.order", "source": "/web", "data": "{}"}
            redis_client.xadd(STREAM, {**about, "id": f"c-{number}"})

    with actors("inbox", str(trace), redis_url) as kill:
        for turn in range(5):
            send(range(turn * 30, turn * 30 + 30))
            send(range(turn * 30, turn * 30 + 30, 5))  # some twice
            eventually(lambda turn=turn: redis_client.hlen("effects") >= turn * 30 + 5, timeout=30)
            time.sleep(chance.uniform(0.0, 0.05))  # no condition: a kill at any moment
            kill(turn % 2)
        eventually(lambda: redis_client.hlen("effects") == 150, timeout=60)
        eventually(lambda: redis_client.xpending(STREAM, GROUP)["pending"] == 0, timeout=60)
    assert set(redis_client.hvals("effects")) == {b"1"}
    replayed = replay_trace(trace, LEASE)
    assert replayed["inbox"] >= 3 * 100


def test_ordered_relays_take_the_steps_of_the_model(
    redis_client, redis_url, database_url, tmp_path
):
    trace = tmp_path / "trace.jsonl"
    made = engine(database_url)
    schema.init(made)

    def emit(first: int) -> None:
        batch = [
            Message(b"{}", {"id": f"e-{n}", "type": "t", "source": "/s", "subject": f"k{n % 20}"})
            for n in range(first, first + 20)
        ]
        with made.begin() as opened:
            Outbox(TOPIC).add(opened, batch)

    with actors("relay", str(trace), redis_url, database_url) as kill:
        for turn in range(4):
            emit(turn * 20)
            eventually(lambda turn=turn: redis_client.xlen(TOPIC) >= turn * 20 + 1, timeout=30)
            kill(turn % 2)
        eventually(lambda: _unpublished(made) == 0, timeout=60)
    made.dispose()
    replayed = replay_trace(trace, LEASE)
    assert replayed["relay"] >= 3 * 20


def _unpublished(made) -> int:
    with made.connect() as opened:
        query = "SELECT count(*) FROM outbox WHERE published_at IS NULL"
        return opened.exec_driver_sql(query).scalar_one()


# --- a replay can fail --------------------------------------------------------------------------


def done(process: int, step: str, result: str, begin: float, end: float | None = None):
    return Operation(process, step, result, begin, begin + 0.5 if end is None else end)


HANDLED = [
    done(0, "read", "entry 0", 1),
    done(0, "lease", "ours", 2),
    done(0, "exec", "applied", 3),
]


def test_a_trace_of_the_model_passes():
    again = [done(1, "read", "entry 1", 4), done(1, "lease", "done", 5)]
    assert replay(RedisInbox(), [*HANDLED, *again, done(1, "exec", "applied", 6)])


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ([done(1, "read", "entry 1", 4), done(1, "lease", "ours", 5)], "result='ours'"),
        ([done(1, "read", "entry 0", 4)], "entry 0"),
        ([done(1, "exec", "applied", 4)], "exec"),
    ],
)
def test_a_step_that_the_model_does_not_allow_is_named(more, what):
    with pytest.raises(NotAllowed, match=what):
        replay(RedisInbox(), [*HANDLED, *more])


def test_two_steps_at_the_same_time_may_have_come_in_either_order():
    """The EXEC of the first takes as long as the lease of the second."""
    first = [*HANDLED[:2], done(0, "exec", "applied", 3, 6)]
    read = done(1, "read", "entry 1", 3.5, 3.6)
    for state in ("held", "done"):
        assert replay(
            RedisInbox(), [*first, read, done(1, "lease", state, 4, 5)], allows=no_lease_ends
        )
    ours = [*first, read, done(1, "lease", "ours", 4, 5)]
    with pytest.raises(NotAllowed, match="'ours'"):
        replay(RedisInbox(), ours, allows=no_lease_ends)


def no_lease_ends(label: Label, now: float) -> bool:
    return label.step != "the_lease_ends"


def test_a_call_without_an_end_may_have_taken_effect_or_not(tmp_path):
    trace = tmp_path / "trace.jsonl"
    begun = {"process": 7, "number": 1, "begin": 1.0, "step": "exec", "of": ["m"]}
    trace.write_text(json.dumps(begun) + "\n")
    assert read_calls(trace) == [begun]
    dies = Operation(0, "exec", "", 3, None)
    for state in ("held", "done"):
        second = [done(1, "read", "entry 1", 4), done(1, "lease", state, 5)]
        assert replay(RedisInbox(), [*HANDLED[:2], dies, *second])


def published(process: int, row: int, begin: float) -> list[Operation]:
    return [
        done(process, "claim", f"rows {row}", begin),
        done(process, "publish", f"row {row} confirmed", begin + 1),
        done(process, "settle", "committed", begin + 2),
    ]


def test_a_trace_of_a_key_is_cut_where_nothing_is_open():
    one, two = published(7, 11, 1), published(8, 12, 4)
    assert [len(part) for part in cut([*one, *two])] == [3, 3]
    # A relay that dies with a row: another one publishes it, and only then comes the cut.
    dies = [done(7, "claim", "rows 11", 1), Operation(7, "publish", "", 2, None)]
    assert [len(part) for part in cut([*dies, *published(8, 11, 3), *published(8, 12, 6)])] == [
        5,
        3,
    ]
    # A lower row that comes later, or one that is claimed while another is open.
    assert [len(part) for part in cut([*two, *published(7, 11, 7)])] == [6]
    early = [*one[:2], done(8, "claim", "rows 12", 3.1), *one[2:], *published(8, 12, 3.2)[1:]]
    assert [len(part) for part in cut(sorted(early, key=lambda item: item.begin))] == [6]


def test_a_wrong_step_behind_a_cut_is_found():
    def calls(found: list[Operation]):
        for number, item in enumerate(found):
            about = {"process": item.process, "number": number, "step": item.step, "of": ["k"]}
            yield {**about, "begin": item.begin, "end": item.end, "results": {"k": [item.result]}}

    right = [line for row in range(50) for line in published(row % 3, row + 100, row * 3.0)]
    assert replay_key(list(calls(right)), "k") == 150
    twice = done(1, "publish", "row 149 confirmed", 151.0)
    with pytest.raises(NotAllowed, match="publish"):
        replay_key(list(calls([*right, twice])), "k")
