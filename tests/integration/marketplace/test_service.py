"""Command → worker → handler → outbox → relay → log: the log is what the generator foresaw."""

from __future__ import annotations

import json

from sqlalchemy import event, func, select
from tests.integration.marketplace.services import handle_all, relay_all

from conquiet import Message
from marketplace.generator import DOMAIN_TOPIC, Generator, commands
from marketplace.oracle import Oracle
from marketplace.service import IllegalTransition, marketplace_router
from marketplace.service.tables import LEDGER, LINES, ORDERS

WORLDLY = ["partial_acceptance", "rollup_revisions"]
WORLD = Generator(seed=11, orders=25, faults=WORLDLY, days=5)


def essence(type_, payload):
    """An event without what a second telling cannot share: the ids that are made on the way."""
    envelope = json.loads(payload)
    del envelope["eventId"]
    for made in ("notification_id", "source_event_id"):
        envelope["data"].pop(made, None)
    return type_, json.dumps(envelope, sort_keys=True)


def counts(engine):
    with engine.connect() as connection:
        return [
            connection.execute(select(func.count()).select_from(table)).scalar()
            for table in (ORDERS, LINES, LEDGER)
        ]


def test_the_log_of_the_services_is_the_one_that_was_generated(engine, redis_client):
    oracle = Oracle()
    entries = list(WORLD.entries(oracle))
    asked = list(commands(entries))
    health = handle_all(engine, redis_client, asked)
    assert health.failed == 0
    assert redis_client.xlen("dead-letters") == 0
    relay_all(engine, redis_client)
    log = [fields for _, fields in redis_client.xrange(DOMAIN_TOPIC)]
    got = sorted(essence(f[b"type"].decode(), f[b"data"]) for f in log)
    expected = sorted(essence(e.type, e.data) for e in entries if not e.is_telemetry)
    assert got == expected
    with engine.connect() as connection:
        found = {
            str(row.id): (row.status, row.collected_cents, row.paid_cents)
            for row in connection.execute(select(ORDERS))
        }
    assert found == {
        row["order_id"]: (row["state"], row["collected_cents"], row["paid_cents"])
        for row in oracle.rows("fact_order")
    }


def test_commands_that_are_delivered_again_change_nothing(engine, redis_client):
    asked = list(commands(WORLD.entries()))[:150]
    handle_all(engine, redis_client, asked)
    relay_all(engine, redis_client)
    before, events = counts(engine), redis_client.xlen(DOMAIN_TOPIC)
    handle_all(engine, redis_client, asked)
    relay_all(engine, redis_client)
    assert counts(engine) == before
    assert redis_client.xlen(DOMAIN_TOPIC) == events
    assert redis_client.xlen("dead-letters") == 0


def test_the_orders_of_a_batch_are_read_and_written_together(engine):
    asked = list(commands(WORLD.entries()))
    router = marketplace_router(engine)
    seen = []
    event.listen(
        engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *more: seen.append(statement),
    )
    batches = [asked[first : first + 50] for first in range(0, len(asked), 50)]
    for batch in batches:
        assert not any(isinstance(done, Exception) for done in router.process(batch))
    reads = [one for one in seen if one.startswith("SELECT") and "FROM market_orders" in one]
    writes = [one for one in seen if one.startswith("UPDATE market_orders")]
    assert 0 < len(reads) <= len(batches)
    assert 0 < len(writes) < len(asked) // 4


def test_a_refused_command_changes_nothing_of_its_neighbours_in_the_batch(engine):
    oracle = Oracle()
    asked = list(commands(WORLD.entries(oracle)))
    [place] = [number for number, one in enumerate(asked) if one.type == "mark.ready"][:1]
    again = Message(asked[place].data, {**asked[place].attributes, "id": "again"})
    results = marketplace_router(engine).process([*asked[:-20], again, *asked[-20:]])
    [refused] = [one for one in results if isinstance(one, Exception)]
    assert isinstance(refused, IllegalTransition)
    with engine.connect() as connection:
        found = {str(row.id): row.status for row in connection.execute(select(ORDERS))}
    assert found == {row["order_id"]: row["state"] for row in oracle.rows("fact_order")}
