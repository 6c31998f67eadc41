"""Each fault shows when it is on, and only then."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from tests.unit.marketplace.parsed import by_order, data, world

from marketplace.generator import FAULTS

ORDERS = 400


def lag_seconds(entry):
    return entry.ms / 1000 - datetime.fromisoformat(entry.time).timestamp()


def readable(entries):
    for entry in entries:
        try:
            yield entry, json.loads(entry.data)
        except json.JSONDecodeError:
            pass


def touches(entries, kind):
    return [data(e) for e in entries if e.type == f"ad_{kind}"]


def is_wrong(created):
    total = created["subtotal_cents"] - created["discounts_cents"] + created["tax_cents"]
    return total + created["transport_fee_cents"] != created["total_cents"]


def repeated_runs(entries):
    """Second publications that follow each other as the first ones did, as after a crash."""
    runs, longest = 0, 0
    for entry in entries:
        runs = runs + 1 if entry.delivery == 2 else 0
        longest = max(longest, runs)
    return longest


SHOWS = {
    "duplicates": lambda es: sum(e.delivery > 1 for e in es),
    "out_of_order": lambda es: sum(2 <= lag_seconds(e) < 3_600 and e.delivery == 1 for e in es),
    "late": lambda es: sum(lag_seconds(e) >= 3_600 and e.delivery == 1 for e in es),
    "partial_acceptance": lambda es: sum(
        content.get("to_status") == "partially_accepted"
        for events in by_order(es).values()
        for _, content in events
    ),
    "click_without_impression": lambda es: len(
        {click["impression_token_id"] for click in touches(es, "click")}
        - {seen["token_id"] for seen in touches(es, "impression")}
    ),
    "rollup_revisions": lambda es: sum(
        e.type == "ad_daily_rollup_ready" and data(e)["rollup_revision"] > 1 for e in es
    ),
    "unknown_type": lambda es: sum(e.type == "checkout_converted" for e in es),
    "unknown_version": lambda es: sum(content["version"] != 1 for _, content in readable(es)),
    "null_data": lambda es: sum(content["data"] is None for _, content in readable(es)),
    "invalid_data": lambda es: sum(content["data"] == {} for _, content in readable(es)),
    "broken_json": lambda es: len(es) - sum(1 for _ in readable(es)),
    "wrong_amounts": lambda es: sum(e.type == "order_created" and is_wrong(data(e)) for e in es),
    "text": lambda es: sum(b"\\u0000" in e.data for e in es),
    "crash": repeated_runs,
}


@pytest.fixture(scope="module")
def faultless():
    return world(orders=ORDERS)


def test_every_fault_has_a_way_to_be_seen():
    assert SHOWS.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_when_it_is_on_and_only_then(name, faultless):
    assert SHOWS[name](faultless) == 0
    assert SHOWS[name](world([name], orders=ORDERS)) > (5 if name == "crash" else 0)


def test_late_means_up_to_11_days():
    late = [lag_seconds(e) for e in world(["late"], orders=ORDERS)]
    assert 9 * 86_400 < max(late) <= 11 * 86_400


def test_what_an_outbox_would_refuse_is_marked_as_foreign():
    for entry in world("all", orders=ORDERS):
        refused = entry.type == "checkout_converted" or b"\\u0000" in entry.data
        if refused:
            assert entry.is_foreign


def test_faults_of_publication_leave_the_events_as_they_are(faultless):
    disturbed = world(["duplicates", "out_of_order", "late", "crash"], orders=ORDERS)
    domain = {(e.event_id, e.data) for e in faultless if not e.is_telemetry}
    # Telemetry is sent again with another id, which moves the ids of what comes after it.
    assert len({e.event_id for e in disturbed if not e.is_telemetry}) == len(domain)
    quiet = world(["out_of_order", "late", "crash"], orders=ORDERS)
    assert {(e.event_id, e.data) for e in quiet if not e.is_telemetry} == domain
    assert [e.event_id for e in quiet] != [e.event_id for e in faultless]


def test_the_second_publication_of_an_event_has_the_same_bytes():
    first = {}
    for entry in world("all", orders=ORDERS):
        assert first.setdefault(entry.event_id, entry.data) == entry.data
