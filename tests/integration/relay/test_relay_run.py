"""`conquiet relay run`: real processes, databases, Redis, signals and probes."""

from __future__ import annotations

import json
import signal

import pytest
from sqlalchemy import insert, text
from tests import zygote
from tests.integration.relay.service import CONQUIET, sample
from tests.integration.sql.claiming import OUTBOX, fill, row, rows, unpublished
from tests.unit.sinks.http_receiver import Receiver
from tests.waiting import eventually

from conquiet.sql import notify_relays

QUICK = ("--poll-ms", "50", "--longest-pause-seconds", "0.2", "--check-timeout-seconds", "1")


def test_it_publishes_what_waits_and_what_comes_and_tells(
    database, engine, redis_url, redis_client, start
):
    fill(engine, 120)
    relay = start(database, redis_url, *QUICK)
    assert eventually(lambda: unpublished(engine) == 0, timeout=30)
    fill(engine, 5, first=200)
    assert eventually(lambda: unpublished(engine) == 0, timeout=30)
    assert redis_client.xlen("orders") == 125
    ready = relay.ready()
    assert ready["status"] == 200
    assert ready["checks"]["sink"]["ok"]
    assert relay.get("/healthz")[0] == 200
    exposition = relay.get("/metrics")[1]
    assert sample(exposition, "conquiet_relay_published_total") == 125
    published = relay.said("published")
    assert len(published) == 125
    assert {"event_id", "event_type", "attempt"} <= published[0].keys()
    assert relay.said("relay starts")[0]["settings"]["batch_size"] == "50"
    assert relay.stop() == 0
    assert relay.said("stopped: published 125, failed 0")


def test_the_gauges_and_readiness_show_what_waits_and_what_is_parked(database, engine, start):
    fill(engine, 3)
    with engine.begin() as connection:
        connection.execute(
            insert(OUTBOX).values(**row(9, attempts=10, last_error="no", parked_at=_now()))
        )
    relay = start(database, "redis://127.0.0.1:1/0", *QUICK)
    assert eventually(lambda: relay.ready()["checks"]["database"].get("parked") == 1, timeout=30)
    ready = relay.ready()
    assert ready["status"] == 503
    assert not ready["checks"]["sink"]["ok"]
    assert ready["checks"]["database"]["ok"]
    exposition = relay.get("/metrics")[1]
    assert sample(exposition, "conquiet_relay_pending") == 3
    assert sample(exposition, "conquiet_relay_parked") == 1
    assert sample(exposition, "conquiet_relay_oldest_unpublished_seconds") >= 0
    assert eventually(lambda: relay.said("outage"))
    assert [found.attempts for found in rows(engine)] == [0, 0, 0, 10]  # an outage costs no attempt
    assert relay.stop() == 0


def test_an_outage_of_the_sink_costs_no_attempt_and_ends_by_itself(
    database, engine, private_redis, start
):
    import redis

    fill(engine, 20)
    private_redis.kill()
    relay = start(database, private_redis.url, *QUICK)
    assert eventually(lambda: len(relay.said("outage")) >= 4, timeout=30)
    assert relay.ready()["status"] == 503
    assert {found.attempts for found in rows(engine)} == {0}
    private_redis.restart()
    assert eventually(lambda: unpublished(engine) == 0, timeout=30)
    assert eventually(lambda: relay.ready()["status"] == 200, timeout=30)
    assert {found.attempts for found in rows(engine)} == {0}
    with redis.Redis.from_url(private_redis.url) as client:
        assert client.xlen("orders") == 20
    assert relay.stop() == 0


def test_an_outage_of_the_database_is_told_and_ends_by_itself(private_postgres, redis_url, start):
    from conquiet.sql import engine as make_engine
    from conquiet.sql import schema

    schema.init(private_postgres.url)
    relay = start(private_postgres.url, redis_url, *QUICK)
    assert eventually(lambda: relay.ready()["status"] == 200, timeout=30)
    private_postgres.kill()
    assert eventually(lambda: relay.ready()["status"] == 503, timeout=30)
    assert relay.get("/healthz")[0] == 200  # starting it anew would mend nothing
    assert eventually(
        lambda: "\nconquiet_relay_pending " not in relay.get("/metrics")[1], timeout=30
    )
    private_postgres.restart()
    engine = make_engine(private_postgres.url)
    fill(engine, 3)
    assert eventually(lambda: unpublished(engine) == 0, timeout=30)
    assert eventually(lambda: relay.ready()["status"] == 200, timeout=30)
    engine.dispose()
    assert relay.stop() == 0


def test_several_relays_share_the_rows_and_none_goes_out_twice(
    database, engine, redis_url, redis_client, start
):
    relays = [start(database, redis_url, *QUICK, "--batch-size", "20") for _ in range(3)]
    assert all(eventually(lambda relay=relay: relay.port, timeout=30) for relay in relays)
    fill(engine, 600)
    assert eventually(lambda: unpublished(engine) == 0, timeout=40)
    assert [relay.stop() for relay in relays] == [0, 0, 0]
    ids = [fields[b"id"] for _, fields in redis_client.xrange("orders")]
    assert len(ids) == len(set(ids)) == 600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_while_rows_keep_coming(
    database, engine, redis_url, redis_client, start, number
):
    fill(engine, 5_000)
    relay = start(database, redis_url, *QUICK, "--log-level", "warning")
    assert eventually(lambda: unpublished(engine) < 5_000, timeout=30)
    relay.process.send_signal(number)
    assert relay.process.wait(40) == 0
    marked = 5_000 - unpublished(engine)
    assert redis_client.xlen("orders") == marked  # what went out is marked, to the row


def test_a_row_that_is_refused_is_parked_alone_and_can_be_sent_again(database, engine, start):

    from tests.integration.relay.service import CONQUIET

    fill(engine, 10)
    fill(engine, 1, first=99)
    with Receiver() as receiver:
        receiver.answers["e-99"] = [500]
        relay = start(database, receiver.url, *QUICK, "--max-attempts", "1")
        assert eventually(lambda: unpublished(engine) == 1, timeout=30)
        assert eventually(lambda: relay.said("parked"), timeout=30)
        assert eventually(
            lambda: relay.ready()["checks"]["database"].get("parked") == 1, timeout=30
        )
        [failure] = relay.said("not published")
        assert failure["reason"] == "Refused"
        exposition = relay.get("/metrics")[1]
        assert sample(exposition, 'conquiet_relay_failed_total{reason="Refused"}') == 1
        receiver.answers.clear()
        done = zygote.run(
            [*CONQUIET, "outbox", "retry", "e-99", "--database", database], check=True
        )
        assert done.returncode == 0
        assert eventually(lambda: unpublished(engine) == 0, timeout=30)
        assert relay.stop() == 0


def test_a_relay_that_is_killed_leaves_nothing_locked(postgres_engine, redis_url, start):
    engine, url = postgres_engine
    fill(engine, 2_000)
    first = start(url, redis_url, *QUICK, "--log-level", "warning")
    assert eventually(lambda: unpublished(engine) < 2_000, timeout=30)
    first.kill()
    second = start(url, redis_url, *QUICK, "--log-level", "warning")
    assert eventually(lambda: unpublished(engine) == 0, timeout=40)
    assert second.stop() == 0


def test_a_stuck_batch_ends_the_process_and_frees_its_rows(postgres_engine, start, full_pipe):
    engine, url = postgres_engine
    fill(engine, 5, data=b'"%s"' % (b"x" * 100_000))
    impatient = ("--stuck-after-seconds", "1", "--publish-timeout-seconds", "0.25")
    relay = start(url, f"file:{full_pipe}", *QUICK, *impatient)
    assert relay.process.wait(30) == 1
    assert relay.said("its rows are released")
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        assert len(connection.execute(text("SELECT id FROM outbox FOR UPDATE")).all()) == 5


def test_a_second_signal_abandons_a_batch_that_hangs(postgres_engine, start, silent_port):
    engine, url = postgres_engine
    fill(engine, 5)
    relay = start(
        url, f"redis://127.0.0.1:{silent_port}/0", *QUICK, "--publish-timeout-seconds", "60"
    )
    assert relay.port
    assert eventually(lambda: relay.get("/readyz")[0] == 503)
    relay.process.terminate()
    assert eventually(lambda: relay.ready()["stopping"])
    relay.process.terminate()
    assert relay.process.wait(20) == 1
    assert relay.said("abandoned")


def test_a_wakeup_is_faster_than_the_poll(postgres_engine, redis_url, start):
    import time

    engine, url = postgres_engine
    relay = start(url, redis_url, "--poll-ms", "30000")
    assert relay.port
    fill(engine, 1)
    notify_relays(engine)
    assert eventually(lambda: unpublished(engine) == 0, timeout=20)
    time.sleep(0.2)
    began = time.monotonic()
    fill(engine, 1, first=2)
    notify_relays(engine)
    assert eventually(lambda: unpublished(engine) == 0, timeout=20)
    assert time.monotonic() - began < 10


def _now():
    from datetime import UTC, datetime

    return datetime.now(UTC)


def test_it_follows_the_log_and_changes_back_and_says_which_and_why(
    postgres_engine, redis_url, redis_client, start
):
    engine, url = postgres_engine
    fill(engine, 10)
    relay = start(url, redis_url, *QUICK, "--from", "wal")
    assert eventually(lambda: redis_client.xlen("orders") == 10, timeout=60)
    fill(engine, 10, first=11)
    assert eventually(lambda: redis_client.xlen("orders") == 20, timeout=60)
    assert relay.said("from the write-ahead log: --from says so")
    assert relay.ready()["checks"]["database"]["slot"] == "reserved"
    assert sample(relay.get("/metrics")[1], "conquiet_relay_slot_lag_bytes") >= 0
    status = zygote.run(
        [*CONQUIET, "outbox", "status", "--database", url], capture_output=True, text=True
    )
    assert "slot     reserved" in status.stdout
    doctor = [*CONQUIET, "doctor", "--json", "--database", url]
    found = json.loads(zygote.run(doctor, capture_output=True, text=True).stdout)["checks"]
    [slot] = [check for check in found if check["name"] == "slot"]
    assert slot["status"] == "notice"
    assert "max_slot_wal_keep_size" in slot["fix"]
    assert relay.stop() == 0
    relay = start(url, redis_url, *QUICK)
    assert eventually(lambda: relay.said("its publication exists"), timeout=60)
    assert relay.port  # it minds signals by now
    assert relay.stop() == 0
    relay = start(url, redis_url, *QUICK, "--from", "claim")
    fill(engine, 10, first=21)
    assert eventually(lambda: redis_client.xlen("orders") >= 30, timeout=60)
    assert eventually(lambda: unpublished(engine) == 0, timeout=60)
    assert relay.said("by claims: --from says so")
    assert relay.stop() == 0
    assert redis_client.xlen("orders") == 30  # each once


def test_without_a_limit_of_the_kept_log_it_claims_and_says_why(postgres_engine, redis_url, start):
    _, url = postgres_engine
    relay = start(url, redis_url, *QUICK)
    assert eventually(lambda: relay.said("by claims: "), timeout=60)
    assert "max_slot_wal_keep_size is not set" in relay.said("by claims: ")[0]["message"]
    assert relay.port  # it minds signals by now
    assert relay.stop() == 0
