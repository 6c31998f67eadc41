"""The outbox as a log with consumer groups: positions, fences, retries, members."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import AsyncAdaptedQueuePool, Engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from conquiet import Message, Router, Worker
from conquiet.acking import settle
from conquiet.cli import main
from conquiet.errors import ConfigError, GivenBack, StoreError
from conquiet.operations import dead_letters
from conquiet.registry import open_source
from conquiet.sql import (
    Cleanup,
    Inbox,
    LogSource,
    Outbox,
    PositionInbox,
    Transaction,
    async_connection,
    connection,
    log_source,
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
WAIT_AT_COMMIT = text(
    "CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN PERFORM pg_advisory_xact_lock_shared(17); RETURN NULL; END $$;"
    "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION wait_at_commit()"
)
WAITING = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock'"
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


@pytest.mark.parametrize("log", ["database_url"], indirect=True)
def test_a_commit_that_the_server_is_still_at_takes_effect_once(log: Engine) -> None:
    [sent] = publish(log, make_messages(1))
    source = member(log)
    batch = read_some(source)
    used: list[Any] = []
    results: list[Any] = []
    event.listen(log, "checkout", lambda driver, *_: used.append(driver))
    with log.connect().execution_options(isolation_level="AUTOCOMMIT") as gate:
        gate.execute(WAIT_AT_COMMIT)
        gate.execute(text("SELECT pg_advisory_lock(17)"))
        thread = threading.Thread(
            target=lambda: results.extend(position_router(source).process(batch))
        )
        thread.start()
        eventually(lambda: gate.execute(WAITING).scalar_one() == 1)
        with socket.socket(fileno=os.dup(used[-1].fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)  # the client knows no end, the server has one to come
        eventually(lambda: gate.execute(WAITING).scalar_one() == 2)
        gate.execute(text("SELECT pg_advisory_unlock(17)"))
    thread.join(10)
    assert not any(isinstance(result, Exception) for result in results)
    assert effects(log) == {sent: 1}


def test_two_transactions_of_a_member_do_not_undo_each_others_position(log: Engine) -> None:
    sent = publish(log, make_messages(4))
    source, following = member(log, partitions=1, lease=0.2), member(log)
    router = position_router(source)
    for batch in (source.read(2, 1.0), source.read(2, 1.0)):
        router.run(batch)  # and no settle, as if another thread were about to
    late = publish(log, make_messages(1, "late"))
    assert ids(read_some(following)) == late
    assert effects(log) == dict.fromkeys(sent, 1)


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
    with pytest.raises(ConfigError, match="engine of the LogSource"):  # not: create tables there
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


def test_the_position_passes_what_an_earlier_member_settled_also_if_nothing_new_comes(
    log: Engine,
) -> None:
    publish(log, make_messages(2))
    first = member(log, partitions=1)
    read_some(first)[1].ack()
    first.close()
    second = member(log, lease=0.3)
    second.read(1, 1.0)[0].ack()  # then it reads the other, which is settled

    def lag() -> int:
        assert second.read(1, 0.05) == []
        with log.connect() as opened:
            return second.tables.lag(opened, 1)[0]

    eventually(lambda: lag() == 0)
    with log.connect() as opened:
        assert [row.settled for row in second.tables.survey(opened)] == ["[]"]


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


def test_a_partition_does_not_wait_long_for_a_member_that_asked_for_it_and_died(
    log: Engine,
) -> None:
    first, second = member(log, partitions=2), member(log)
    first.read(1, 0)
    second.read(1, 0)  # it asks, and dies
    first._beat_at = 0.0
    first.read(1, 0)
    with log.connect() as opened:
        rows = first.tables.survey(opened)
    waiting = [row for row in rows if row.owner == second.member]
    assert len(waiting) == 1
    assert 0 < waiting[0].seconds_left <= 3


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


def test_a_message_that_kills_its_members_is_found_behind_many_others(log: Engine) -> None:
    before = publish(log, make_messages(250))  # more than are read one by one after a crash
    publish(log, [*make_messages(1, "killer"), *make_messages(1, "n")])
    done: set[str] = set()
    dead = 0
    while not dead:
        source = member(log, lease=1.0, max_attempts=2, partitions=1)
        while True:
            batch = eventually(lambda source=source: source.read(300, 0.05) or source.dead)
            dead += source.dead
            if source.dead or "killer-0" in ids(batch):
                break  # and no close: it is killed
            settle([message.acking for message in batch if message.acking is not None])
            done.update(ids(batch))
    rest = member(log)
    done.update(ids(read_some(rest)) if "n-0" not in done else [])
    assert done == {*before, "n-0"}


def test_a_message_that_kills_slowly_becomes_a_dead_letter_beside_other_lanes(
    log: Engine,
) -> None:
    publish(log, [*make_messages(1, "killer"), *make_messages(1)])
    for number in range(9):
        source = member(log, lease=0.05, max_attempts=2, partitions=1)
        killer = eventually(lambda source=source: source.read(1, 0.05) or source.dead)
        if source.dead:
            break
        assert ids(killer) == ["killer-0"]
        publish(log, make_messages(1, f"n{number}"))
        for message in source.read(1, 0.05):  # another lane of the worker, which goes on meanwhile
            message.ack()
    assert source.dead


def test_a_message_that_kills_its_members_does_not_bury_those_of_other_partitions(
    log: Engine,
) -> None:
    """Each partition of a member that died used to count the crash against its first message."""
    one, other = keys_of_two_partitions()
    publish(log, make_messages(1, "killer", partitionkey=one))
    publish(log, make_messages(1, partitionkey=other))
    for _ in range(2):
        killed = member(log, lease=0.05, max_attempts=2, partitions=2)
        assert ids(eventually(lambda source=killed: source.read(1, 0.05))) == ["killer-0"]
    last = member(log, max_attempts=2)
    assert ids(read_some(last)) == ["m-0"]
    assert last.dead == 1


def test_members_that_die_idle_cost_the_next_messages_no_attempts(log: Engine) -> None:
    for _ in range(3):
        killed = member(log, lease=0.05, max_attempts=1, partitions=2)
        eventually(lambda source=killed: source.read(1, 0.01) or len(source._held) == 2)
    last = member(log, max_attempts=1)
    eventually(lambda: last.read(1, 0.01) or len(last._held) == 2)
    sent = publish(log, make_messages(20))
    assert ids(read_some(last)) == sent  # in a batch: none of them was there at a crash
    assert not last.dead


def test_a_member_that_closes_takes_its_blame_back(log: Engine) -> None:
    publish(log, make_messages(1))
    for _ in range(2):
        read_some(member(log, lease=0.05, max_attempts=2, partitions=1))
    for _ in range(3):
        last = member(log, max_attempts=3)
        assert [message.deliveries for message in read_some(last)] == [3]
        last.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_members_at_the_edge_of_their_leases_repeat_and_lose_nothing(
    log: Engine, seed: int
) -> None:
    """Members pause for about as long as their lease between read, commit and ack, and vanish."""
    sent = publish(
        log, [make_messages(1, id=f"m-{n}", partitionkey=f"k{n % 9}")[0] for n in range(60)]
    )
    is_done = threading.Event()
    lease = 0.06

    def work(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        source: LogSource | None = None
        while not is_done.is_set():
            if source is None:
                source = member(log, lease=lease, partitions=4, backoff=0.01, max_attempts=1000)
                router = position_router(source)
            with suppress(StoreError):  # SQLite may be locked for long
                batch = source.read(chance.choice((1, 5, 20)), 0.02)
                is_done.wait(chance.choice((0, 0, 0.9, 1.0, 1.1)) * lease)
                handled = router.run(batch)
                is_done.wait(chance.choice((0, 0, 0.9, 1.1)) * lease)
                if chance.random() < 0.2:
                    source = None  # killed before it acks
                    continue
                router.settle(handled)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(effects(log)) == len(sent), timeout=60)
        publish(log, make_messages(1, "last"))
        eventually(lambda: len(effects(log)) == len(sent) + 1, timeout=60)
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert effects(log) == dict.fromkeys([*sent, "last-0"], 1)


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


def keys_of_two_partitions() -> tuple[str, str]:
    found = {partition_of(key, 0, 2): key for key in "abcdefgh"}
    return found[0], found[1]


def steal(engine: Engine, partition: int) -> None:
    """Take a partition as another member would after the end of a lease."""
    taken = "UPDATE outbox_positions SET owner = 'thief', version = 1, lease_until = 1e12"
    with engine.begin() as opened:
        opened.execute(text(f"{taken} WHERE partition = {partition}"))


def test_what_is_settled_with_a_message_of_a_lost_partition_is_not_forgotten(log: Engine) -> None:
    lost, kept = keys_of_two_partitions()
    publish(log, [make_messages(1, id=key, partitionkey=key)[0] for key in (lost, kept)])
    publish(log, [make_messages(1, id="bad", partitionkey=kept)[0]])
    source = member(log, partitions=2)
    batch = {message.id: message for message in read_some(source)}
    steal(log, 0)
    ackings = [batch[id_].acking for id_ in (lost, kept, "bad")]
    settle(ackings[:2], [(ackings[2], ValueError("not yet"))])
    assert source.late == 1
    [again] = read_some(source)
    assert (again.id, again.deliveries) == ("bad", 2)
    again.ack()
    source.close()
    assert member(log).read(10, 0.05) == []


def test_a_transaction_of_a_lost_partition_runs_no_handler_again(log: Engine) -> None:
    lost, kept = keys_of_two_partitions()
    publish(log, [make_messages(1, id=key, partitionkey=key)[0] for key in (lost, kept)])
    source = member(log, partitions=2)
    runs: list[str] = []
    router = Router()
    router.use(Transaction(log), PositionInbox(source, producers_repeat=False))

    @router.raw(name="count")
    def count(message: Message[Any]) -> None:
        runs.append(message.id)

    batch = read_some(source)
    steal(log, 0)
    router.process(batch)
    router.process(read_some(source))
    assert runs == [lost, kept, kept]
    assert source.read(10, 0.05) == []


@pytest.mark.parametrize("failing", ["horizon", "rows", "claim_retries", "park"])
def test_messages_that_were_read_before_a_read_failed_are_delivered(
    log: Engine, monkeypatch: Any, failing: str
) -> None:
    """A read has several statements, and the store may fail between them."""
    blocked, other = keys_of_two_partitions()
    publish(log, make_messages(1, id="bad", partitionkey=blocked))
    source = member(log, partitions=2, backoff=0.1)
    read_some(source)[0].nack(ValueError("not yet"))
    sent = publish(
        log,
        [
            make_messages(1, id=f"{key}{n}", partitionkey=key)[0]
            for n in range(3)
            for key in (blocked, other)
        ],
    )
    calls = 0
    call = getattr(source.tables, failing)

    def fail_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if failing in ("horizon", "rows") else 1):
            raise OperationalError("SELECT", {}, Exception("the connection was lost"))
        return call(*arguments)

    monkeypatch.setattr(source.tables, failing, fail_once)
    got: list[str] = []

    def has_all() -> bool:
        with suppress(StoreError):
            for message in source.read(3, 0.02):
                got.append(message.id)
                message.ack()
        return len(got) >= 7

    eventually(has_all)
    assert calls > 1 or failing == "park"
    assert sorted(got) == sorted(["bad", *sent])


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


@pytest.mark.parametrize("log", ["database_url"], indirect=True)
def test_after_a_restore_into_another_cluster_positions_beyond_its_end_are_reported(
    log: Engine,
) -> None:
    publish(log, make_messages(3))
    source = member(log)
    for message in read_some(source):
        message.ack()
    source.close()
    ahead = "xid = CAST(CAST(CAST(xid AS text) AS bigint) + 1000000 AS text)"
    with log.begin() as opened:  # as if they came from a cluster with more transactions
        opened.execute(text(f"UPDATE outbox SET {ahead}::xid8"))
        opened.execute(text(f"UPDATE outbox_positions SET {ahead}::bigint"))
    with pytest.raises(ConfigError, match="lies beyond the end of the log"):
        Worker(member(log), counting_router(log)).run()
    page = Path("docs/how-to/no-broker.md").read_text().partition("## Another cluster")[2]
    with log.begin() as opened:
        opened.execute(text(page.partition("```sql\n")[2].partition("```")[0]))
    sent = publish(log, make_messages(2, "new"))
    assert ids(read_some(member(log))) == sent


def test_a_waiting_member_is_woken_by_a_write(log: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_source, "_BEAT_SECONDS", 600.0)
    source = member(log, poll=600.0, lease=3600.0)
    for _ in range(2):  # it has its partitions, and listens
        assert not source.read(1, 0.05)
    is_waiting, wait = threading.Event(), source._wakeup.wait
    monkeypatch.setattr(source._wakeup, "wait", lambda left: is_waiting.set() or wait(left))
    found: list[Message[bytes]] = []
    threading.Thread(target=lambda: found.extend(source.read(10, 600.0)), daemon=True).start()
    assert is_waiting.wait(60)

    def write_in_session() -> None:
        with Session(log) as session, session.begin():
            Outbox("orders").add(session, make_messages(1))

    # Again and again: a transaction of another test may keep the end of the log below the first.
    eventually(lambda: write_in_session() or found, timeout=60, interval=0.2)
    assert set(ids(found)) == {"m-0"}


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


def url_of(engine: Engine, query: str) -> str:
    url = engine.url.render_as_string(hide_password=False)
    return f"{url}{'&' if '?' in url else '?'}{query}"


def test_a_parameter_of_a_url_that_is_missing_unknown_or_wrong_is_named(log: Engine) -> None:
    for query, said in (
        ("topic=orders", "say which group"),
        ("group=billing", "say which topic"),
        ("topic=orders&group=g&partitions=many", "partitions='many'"),
        ("topic=orders&group=g&partition=4", "'partition' is a parameter neither of the source"),
        ("topic=orders&group=g&exactly_once=always", "choose one of inbox, position"),
        ("topic=orders&group=g&exactly_once=position", "producers_repeat=false"),
        ("topic=orders&group=g&producers_repeat=no", "choose true or false"),
        ("topic=orders&topic=bills&group=g", "topic is in the URL 2 times"),
        ("topic=orders,bills&group=g", "a worker for each"),
        ("topic=orders&group=g&lease=inf", "lease=inf: must be a number of seconds above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_source(url_of(log, query))


def test_a_source_that_never_reached_its_database_closes_in_silence(
    log: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to warn that it could not release partitions, of which it had none."""
    source = member(log, table="elsewhere")
    with pytest.raises(StoreError):
        source.read(1, 0.0)
    source.close()
    assert not caplog.records


def test_a_source_is_opened_by_its_url(log: Engine) -> None:
    sent = publish(log, make_messages(2))
    source = open_source(url_of(log, "topic=orders&group=billing&lease=5"))
    assert ids(read_some(source)) == sent  # type: ignore[arg-type]
    source.close()
    for _, driver in DRIVERS.values():  # that of an async worker's engine
        if driver.startswith(log.dialect.name):
            url = log.url.set(drivername=driver).render_as_string(hide_password=False)
            source = open_source(f"{url}?topic=orders&group={driver[-5:]}")
            assert ids(read_some(source)) == sent  # type: ignore[arg-type]
            source.close()


def counting_router(engine: Engine, *inboxes: Any) -> Router:
    router = Router()
    router.use(Transaction(engine), *inboxes)

    @router.raw(name="count")
    def count(message: Message[Any]) -> None:
        with connection(engine) as found:
            found.execute(COUNT_UP, {"id": message.id})

    return router


def test_by_url_a_worker_moves_the_position_with_the_effects(log: Engine) -> None:
    sent = publish(log, make_messages(3))
    query = "topic=orders&group=billing&exactly_once=position&producers_repeat=false"
    worker = Worker(open_source(url_of(log, query)), counting_router(log))
    worker.start()
    eventually(lambda: worker.health().handled == 3)
    assert worker.stop()
    assert effects(log) == dict.fromkeys(sent, 1)
    assert member(log).read(10, 0.05) == []


def test_a_second_inbox_beside_the_position_is_refused_at_start(log: Engine) -> None:
    source = member(log, exactly_once="position", producers_repeat=False)
    with pytest.raises(ConfigError, match="two inboxes"):
        Worker(source, counting_router(log, Inbox("billing"))).start()
    router = Router()
    router.raw(name="second")(_ignore)
    with pytest.raises(ConfigError, match="Transaction"):
        Worker(source, router).start()


def test_a_worker_ends_if_its_group_has_another_number_of_partitions(log: Engine) -> None:
    member(log, partitions=4).read(1, 0)
    with pytest.raises(ConfigError, match="has 4 partitions, not 8"):
        Worker(member(log, partitions=8), counting_router(log)).run()


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


def test_cleanup_waits_for_the_slowest_group(log: Engine) -> None:
    publish(log, make_messages(4))
    sources = [member(log, group) for group in ("billing", "shipping")]
    batches = [read_some(source) for source in sources]
    with log.begin() as opened:
        opened.execute(text("UPDATE outbox SET created_at = '2020-01-01'"))
    for source, batch, removed in zip(sources, batches, (0, 4), strict=True):
        for message in batch:
            message.ack()
        source.close()
        assert Cleanup(log, inbox=None, relayed=False).run_once().outbox == removed


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
    assert main(["outbox", "status", *database]) == 0
    assert "group    billing of orders: 3 behind, 1 to retry, 0 dead" in capsys.readouterr().out
    url = url_of(log, "topic=orders&group=")
    assert main(["streams", "lag", f"{url}billing", "--max", "2", "--json"]) == 1
    [same] = json.loads(capsys.readouterr().out)["lags"]
    assert same | {"behind_seconds": 0} == found | {"behind_seconds": 0}
    assert main(["streams", "lag", f"{url}shipping"]) == 1
    assert "no group 'shipping' of topic 'orders'" in capsys.readouterr().err
    assert main(["streams", "lag", url_of(log, "topic=orders")]) == 2
    assert "say which group" in capsys.readouterr().err
    assert main(["streams", "lag", "redis://localhost/0?stream=orders&group=billing"]) == 2
    assert "--broker" in capsys.readouterr().err
    assert main(["streams", "remove-group", "orders", "billing", "--yes", *database]) == 0
    assert main(["streams", "remove-group", "orders", "billing", "--yes", *database]) == 1
    assert ids(read_some(member(log))) == [f"m-{number}" for number in range(5)]
    capsys.readouterr()
    assert main(["streams", "remove-group", "orders", "billing", "--yes", *database]) == 1
    assert "workers of group 'billing' read topic 'orders'" in capsys.readouterr().err


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
    router = counting_router(log, Inbox("billing"))
    first, second = member(log, lease=0.2, partitions=1), member(log)
    router.run(read_some(first))  # and no settle
    taken = 0
    while taken < 3:
        batch = read_some(second)
        taken += len(batch)
        router.process(batch)
    assert effects(log) == dict.fromkeys(sent, 1)


# --- on an event loop -------------------------------------------------------------------------

DRIVERS = {
    "asyncpg": ("database_url", "postgresql+asyncpg"),
    "psycopg": ("database_url", "postgresql+psycopg_async"),
    "aiosqlite": ("sqlite_url", "sqlite+aiosqlite"),
}


@pytest.mark.parametrize("mode", ["inbox", "position"])
@pytest.mark.parametrize(
    ("log", "driver"), list(DRIVERS.values()), ids=list(DRIVERS), indirect=["log"]
)
def test_an_async_worker_handles_each_once_and_keeps_the_order_of_a_key_that_fails(
    log: Engine, driver: str, mode: Any
) -> None:
    made = [make_messages(1, id=f"m-{n}", partitionkey=f"k{n % 5}")[0] for n in range(60)]
    sent = publish(log, made)
    source = member(log, exactly_once=mode, producers_repeat=False, backoff=0.02)
    done: list[str] = []

    async def work() -> None:
        engine = create_async_engine(
            log.url.set(drivername=driver), pool_size=8, poolclass=AsyncAdaptedQueuePool
        )
        router = Router()
        router.use(Transaction(engine), *([Inbox("billing")] if mode == "inbox" else []))

        @router.raw(name="count")
        async def count(message: Message[Any]) -> None:
            async with async_connection(engine) as found:
                await found.execute(COUNT_UP, {"id": message.id})
            if message.id in ("m-7", "m-9") and message.deliveries < 3:
                raise ValueError("not yet")
            done.append(message.id)

        async with Worker(source, router, ordered=True, batch_size=4, concurrency=6) as worker:
            while worker.health().handled - worker.health().failed < 60:
                assert worker.health().ok
                await asyncio.sleep(0.01)
        await engine.dispose()

    asyncio.run(asyncio.wait_for(work(), 20))
    assert effects(log) == dict.fromkeys(sent, 1)
    last = {id_: place for place, id_ in enumerate(done)}
    for key in range(5):
        places = [last[id_] for id_ in sent if int(id_[2:]) % 5 == key]
        assert places == sorted(places)
    assert member(log).read(10, 0.05) == []


@pytest.mark.parametrize(
    ("log", "driver"), list(DRIVERS.values()), ids=list(DRIVERS), indirect=["log"]
)
def test_an_async_member_that_is_killed_repeats_nothing_in_position_mode(
    log: Engine, driver: str
) -> None:
    """Many transactions are in flight for one partition; what they committed is not acked yet."""
    sent = publish(log, make_messages(40))
    source = member(log, partitions=1, lease=0.5, exactly_once="position", producers_repeat=False)
    source.settle = lambda acked, nacked: None  # type: ignore[method-assign]  # it dies before

    async def work() -> None:
        engine = create_async_engine(
            log.url.set(drivername=driver), pool_size=8, poolclass=AsyncAdaptedQueuePool
        )
        router = Router()
        router.use(Transaction(engine))

        @router.raw(name="count")
        async def count(message: Message[Any]) -> None:
            async with async_connection(engine) as found:
                await found.execute(COUNT_UP, {"id": message.id})

        async with Worker(source, router, batch_size=3, concurrency=6) as worker:
            while worker.health().handled < 40:
                await asyncio.sleep(0.01)
        await engine.dispose()

    source.close = lambda: None  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(work(), 20))
    del source.close
    late = publish(log, make_messages(1, "late"))
    assert ids(read_some(member(log))) == late
    assert effects(log) == dict.fromkeys(sent, 1)
