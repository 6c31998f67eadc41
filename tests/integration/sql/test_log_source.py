"""The outbox as a log with consumer groups: positions, fences, retries, members."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, text

from conquiet import Message, Router
from conquiet.cli import main
from conquiet.errors import ConfigError, GivenBack, StoreError
from conquiet.operations import dead_letters
from conquiet.registry import SourceOptions, connect_source
from conquiet.sql import (
    Cleanup,
    Inbox,
    LogSource,
    Outbox,
    PositionInbox,
    Transaction,
    connection,
    schema,
)
from conquiet.sql import engine as make_engine
from conquiet.sql.log_group import partition_of
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import ids, make_messages

COUNT_UP = text(
    "INSERT INTO effects (id, times) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET times = effects.times + 1"
)


@pytest.fixture(params=["sqlite_url", "database_url"])
def log(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine(request.getfixturevalue(request.param))
    schema.init(made)
    with made.begin() as opened:
        opened.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY, times INTEGER)"))
    yield made
    while OPENED:
        OPENED.pop().close()
    made.dispose()


OPENED: list[LogSource] = []


def publish(engine: Engine, messages: Sequence[Message[Any]], topic: str = "orders") -> list[str]:
    with engine.begin() as opened:
        Outbox(topic).add(opened, messages)
    return ids(messages)


def member(engine: Engine, group: str = "billing", **options: Any) -> LogSource:
    settings = {"poll": 0.02, "backoff": 0.0, "lease": 60.0, **options}
    OPENED.append(LogSource(engine, "orders", group, **settings))
    return OPENED[-1]


def position_router(source: LogSource, *, transaction: Transaction | None = None) -> Router:
    """Effects are counted; a message called bad fails after its effect."""
    router = Router()
    router.use(
        transaction or Transaction(source.engine), PositionInbox(source, producers_repeat=False)
    )

    @router.raw(name="count")
    def count(message: Message[Any]) -> None:
        with connection(source.engine) as found:
            found.execute(COUNT_UP, {"id": message.id})
        if message.id.startswith("bad"):
            raise ValueError("it never works")

    return router


def effects(engine: Engine) -> dict[str, int]:
    with engine.connect() as opened:
        found = opened.execute(text("SELECT id, times FROM effects")).all()
    return {row.id: row.times for row in found}


def read_some(source: LogSource) -> Sequence[Message[bytes]]:
    return eventually(lambda: source.read(100, 0.05))


# --- position and effects in one transaction --------------------------------------------------


def test_after_a_crash_between_commit_and_ack_nothing_is_delivered_again(log: Engine) -> None:
    sent = publish(log, make_messages(20))
    first, second = member(log, lease=0.2), member(log)
    handled = position_router(first).run(read_some(first))  # and no settle: it is killed here
    assert len(handled.results) == 20
    late = publish(log, make_messages(1, "late"))
    assert ids(read_some(second)) == late
    assert effects(log) == dict.fromkeys(sent, 1)


def test_with_a_rollback_the_position_stays(log: Engine) -> None:
    sent = publish(log, make_messages(3))
    first, second = member(log, lease=0.2), member(log)
    router = position_router(first)
    batch = read_some(first)
    with suppress(RuntimeError), Transaction(log).scope(batch):
        router.run(batch)
        raise RuntimeError("the end of the process")
    assert ids(read_some(second)) == sent[:1]  # one by one, since one of them may be the cause
    assert effects(log) == {}


def test_a_member_that_lost_its_partitions_cannot_commit(log: Engine) -> None:
    sent = publish(log, make_messages(5))
    slow = member(log, lease=0.1)
    batch = read_some(slow)
    fast = member(log)
    done: list[str] = []

    def take_over() -> bool:
        messages = fast.read(100, 0.05)
        position_router(fast).process(messages)
        done.extend(ids(messages))
        return len(done) == 5

    eventually(take_over)
    position_router(slow).process(batch)
    assert effects(log) == dict.fromkeys(sent, 1)
    publish(log, make_messages(1, "late"))
    assert ids(read_some(fast)) == ["late-0"]


def test_a_commit_whose_answer_is_lost_takes_effect_once(log: Engine) -> None:
    class Deaf(Transaction):
        answers = 1

        def commit(self, next: Any, batch: Any) -> Any:
            results = super().commit(next, batch)
            if self.answers:
                self.answers -= 1
                raise StoreError("committed, and the connection was lost")
            return results

    sent = publish(log, make_messages(4))
    source = member(log)
    results = position_router(source, transaction=Deaf(log)).process(read_some(source))
    assert not any(isinstance(result, Exception) for result in results)
    assert effects(log) == dict.fromkeys(sent, 1)
    assert source.read(100, 0) == []


def test_a_failed_message_is_parked_and_the_others_pass_it(log: Engine) -> None:
    publish(log, [*make_messages(2), *make_messages(1, "bad"), *make_messages(2, "n")])
    source = member(log, max_attempts=3)
    router = position_router(source)

    def is_dead() -> bool:
        router.process(source.read(100, 0.02))
        return source.dead == 1

    eventually(is_dead)
    assert effects(log) == {"m-0": 1, "m-1": 1, "n-0": 1, "n-1": 1}
    source.close()
    following = member(log)
    assert following.read(100, 0.05) == []


def test_a_retry_that_succeeds_takes_effect_once_in_position_mode(log: Engine) -> None:
    publish(log, make_messages(3))
    source = member(log)
    first, *rest = read_some(source)
    first.nack(ValueError("not yet"))
    router = position_router(source)
    router.process(rest)
    [again] = read_some(source)
    assert (again.id, again.deliveries) == ("m-0", 2)
    router.process([again])
    assert effects(log) == {"m-0": 1, "m-1": 1, "m-2": 1}
    source.close()
    assert member(log).read(100, 0.05) == []


def test_position_mode_is_refused_where_it_would_not_protect(log: Engine, tmp_path: Any) -> None:
    source = member(log)
    with pytest.raises(ConfigError, match="producers_repeat=False"):
        PositionInbox(source)
    other = make_engine(f"sqlite:///{tmp_path / 'other.sqlite'}")
    schema.init(other)
    with pytest.raises(ConfigError, match="engine of the LogSource"):
        position_router(source, transaction=Transaction(other)).start()
    with pytest.raises(ConfigError, match="isolate='batch'"):
        position_router(source, transaction=Transaction(log, isolate="savepoint")).start()
    other.dispose()


def test_two_handlers_of_a_message_are_refused_in_position_mode(log: Engine) -> None:
    publish(log, make_messages(1))
    source = member(log)
    router = position_router(source)
    router.raw(name="second")(_ignore)
    results = router.process(read_some(source))
    assert all("use Inbox" in str(result) for result in results)
    assert effects(log) == {}


def _ignore(message: Message[Any]) -> None:
    pass


def test_what_an_earlier_member_settled_out_of_order_stays_settled(log: Engine) -> None:
    publish(log, make_messages(6))
    first = member(log, partitions=1)
    messages = read_some(first)
    messages[2].ack()
    messages[5].ack()
    first.close()
    second = member(log)
    second.read(2, 1.0)[0].ack()  # it has not read as far as the first had
    second.close()
    assert ids(read_some(member(log))) == ["m-1", "m-3", "m-4"]


# --- members ----------------------------------------------------------------------------------


def test_members_share_the_partitions_and_replace_each_other(log: Engine) -> None:
    first, second = member(log, lease=0.3), member(log, lease=0.3)
    first.read(1, 0)
    assert len(first._held) == 8

    def is_balanced() -> bool:
        first.read(1, 0.01)
        second.read(1, 0.01)
        return len(first._held) == len(second._held) == 4

    eventually(is_balanced)
    sent = publish(log, [make_messages(1, id=f"m-{n}", partitionkey=f"k{n}")[0] for n in range(40)])
    got = [[*read_some(first)], [*read_some(second)]]
    assert sorted(ids([*got[0], *got[1]])) == sorted(sent)
    first.close()
    again: list[Message[bytes]] = []

    def has_all() -> bool:
        again.extend(second.read(100, 0.01))
        return len(second._held) == 8 and len(again) >= len(got[0])

    eventually(has_all)
    assert sorted(ids(again)) == sorted(ids(got[0]))


def test_a_partition_moves_when_its_messages_in_flight_are_settled(log: Engine) -> None:
    key = next(key for key in "abcdefgh" if partition_of(key, 0, 2) == 0)  # it is asked for first
    publish(log, make_messages(1, partitionkey=key))
    first, second = member(log, partitions=2, lease=0.3), member(log, lease=0.3)
    [held] = read_some(first)

    def is_asked() -> bool:
        first.renew([held])
        assert second.read(1, 0.01) == []
        first.read(1, 0.01)
        return any(tenure.is_leaving for tenure in first._held.values())

    eventually(is_asked)
    assert not second._held
    held.ack()
    eventually(lambda: first.read(1, 0.01) == second.read(1, 0.01) and len(second._held) == 1)
    assert second.read(1, 0.05) == []


def test_a_message_that_kills_its_members_becomes_a_dead_letter(log: Engine) -> None:
    publish(log, [*make_messages(1), *make_messages(1, "killer"), *make_messages(1, "n")])
    done: list[str] = []
    dead = 0
    while not dead:
        source = member(log, lease=0.05, max_attempts=2, partitions=1)
        while True:
            batch = eventually(lambda source=source: source.read(100, 0.05) or source.dead)
            dead += source.dead
            if source.dead or any(message.id == "killer-0" for message in batch):
                break  # and no close: it is killed
            for message in batch:
                done.append(message.id)
                message.ack()
    rest = member(log)
    done += ids(read_some(rest)) if "n-0" not in done else []
    assert done == ["m-0", "n-0"]


def test_the_number_of_partitions_is_fixed(log: Engine) -> None:
    member(log, partitions=4).read(1, 0)
    with pytest.raises(ConfigError, match="has 4 partitions, not 8"):
        member(log, partitions=8).read(1, 0)
    member(log).read(1, 0)


def test_both_databases_compute_the_same_partition(log: Engine) -> None:
    keys = ["a", "ünï ☃", "customer-7", "x" * 300]
    publish(log, [make_messages(1, id=str(n), partitionkey=key)[0] for n, key in enumerate(keys)])
    tables = member(log).tables
    with log.connect() as opened:
        rows = tables.rows_by_id(opened, [1, 2, 3, 4], 8)
    assert [row.partition for row in rows] == [partition_of(key, 0, 8) for key in keys]


# --- the log ----------------------------------------------------------------------------------


def test_a_row_that_commits_late_is_not_passed_over(database_url: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine)
    source = member(engine)
    with engine.connect() as late:
        Outbox("orders").add(late, make_messages(1, "late"))
        publish(engine, make_messages(1, "early"))
        assert source.read(10, 0.1) == []  # the order of the log is not known yet
        late.commit()
    assert ids(read_some(source)) == ["late-0", "early-0"]
    source.close()
    engine.dispose()


def test_other_topics_are_passed_and_their_rows_are_not_read_again(log: Engine) -> None:
    publish(log, make_messages(50), topic="noise")
    source = member(log)
    assert source.read(10, 0.1) == []
    assert {tenure.cursor > (0, 0) for tenure in source._held.values()} == {True}
    source.close()
    with log.connect() as opened:
        assert all(row.id or row.xid for row in source.tables.survey(opened))


def test_a_group_may_start_now(log: Engine) -> None:
    publish(log, make_messages(3))
    source = member(log, start="now")
    assert source.read(10, 0.05) == []
    sent = publish(log, make_messages(1, "new"))
    assert ids(read_some(source)) == sent


def test_a_source_is_opened_by_its_url(log: Engine) -> None:
    sent = publish(log, make_messages(2))
    url = log.url.render_as_string(hide_password=False)
    mark = "&" if "?" in url else "?"
    for wrong, said in (("topic=orders", "say which group"), ("group=billing", "say which topic")):
        with pytest.raises(ConfigError, match=said):
            connect_source(f"{url}{mark}{wrong}", SourceOptions())
    with pytest.raises(ConfigError, match="partitions='many'"):
        connect_source(f"{url}{mark}topic=orders&group=g&partitions=many", SourceOptions())
    source = connect_source(f"{url}{mark}topic=orders&group=billing", SourceOptions())
    assert ids(read_some(source)) == sent  # type: ignore[arg-type]
    source.close()


# --- retention, lag and dead letters ----------------------------------------------------------


def test_cleanup_keeps_what_a_group_still_needs(log: Engine) -> None:
    publish(log, make_messages(4))
    source = member(log, partitions=1)
    first, second, *_ = read_some(source)
    with log.begin() as opened:
        opened.execute(
            text("UPDATE outbox SET published_at = '2020-01-01', created_at = '2020-01-01'")
        )
    for relayed in (True, False):
        assert Cleanup(log, inbox=None, relayed=relayed).run_once().outbox == 0
    first.ack()
    second.nack(ValueError("to be retried"))
    source.close()
    assert Cleanup(log, inbox=None, relayed=False).run_once().outbox == 1
    following = member(log)
    rest = list(read_some(following))
    assert ids(rest) == ["m-1", "m-2", "m-3"]
    for message in rest:
        message.ack()
    following.close()
    assert Cleanup(log, inbox=None).run_once().outbox == 3


def test_lag_is_shown_and_a_group_is_removed(log: Engine, capsys: Any) -> None:
    publish(log, make_messages(5))
    source = member(log)
    first, second, *_ = read_some(source)
    first.ack()
    second.nack(ValueError("to be retried"))
    source.close()
    database = ["--database", log.url.render_as_string(hide_password=False)]
    assert main(["streams", "lag", *database, "--max", "2", "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)["lags"]
    assert (found["stream"], found["name"], found["lag"], found["pending"]) == (
        *("orders", "billing"),
        *(3, 1),
    )
    assert main(["streams", "remove-group", "orders", "billing", "--yes", *database]) == 0
    assert main(["streams", "remove-group", "orders", "billing", "--yes", *database]) == 1
    assert ids(read_some(member(log))) == [f"m-{number}" for number in range(5)]


def test_dead_letters_are_found_and_replayed_for_their_group_alone(log: Engine) -> None:
    publish(log, make_messages(2))
    other = member(log, "shipping")
    for message in read_some(other):
        message.ack()
    source = member(log, max_attempts=1)
    for message in read_some(source):
        message.nack(ValueError("it never works"))
    url = log.url.render_as_string(hide_password=False)
    mark = "&" if "?" in url else "?"
    letters = dead_letters.open_letters(f"{url}{mark}topic=orders&group=billing")
    found = dead_letters.find(letters)
    assert [(letter.event_id, letter.attempts) for letter in found] == [("m-0", 1), ("m-1", 1)]
    assert "it never works" in found[0].reason
    assert "ValueError" in found[0].traceback
    assert dead_letters.drop(letters, dead_letters.Filter(("m-1",))).done == (found[1].id,)
    assert dead_letters.replay(letters, dead_letters.Filter(("m-0",))).done == (found[0].id,)
    source.close()
    [again] = read_some(member(log))
    assert (again.id, again.deliveries) == ("m-0", 1)
    assert other.read(10, 0.05) == []


def test_later_messages_of_a_key_wait_behind_a_failed_one_also_in_another_member(
    log: Engine,
) -> None:
    sent = publish(log, make_messages(3, partitionkey="k"))
    first = member(log, backoff=0.2)
    head, *rest = read_some(first)
    head.nack(ValueError("not yet"))
    for message in rest:
        message.nack(GivenBack("an earlier message failed"))
    first.read(10, 0.05)
    first.close()
    second = member(log)
    got = list(read_some(second))
    while len(got) < 3:
        got += read_some(second)
    assert ids(got) == sent


def test_the_inbox_skips_what_is_delivered_again(log: Engine) -> None:
    sent = publish(log, make_messages(3))
    router = Router()
    router.use(Transaction(log), Inbox("billing"))

    @router.raw(name="count")
    def count(message: Message[Any]) -> None:
        with connection(log) as found:
            found.execute(COUNT_UP, {"id": message.id})

    first, second = member(log, lease=0.2, partitions=1), member(log)
    router.run(read_some(first))  # and no settle
    taken = 0
    while taken < 3:
        batch = read_some(second)
        taken += len(batch)
        router.process(batch)
    assert effects(log) == dict.fromkeys(sent, 1)
