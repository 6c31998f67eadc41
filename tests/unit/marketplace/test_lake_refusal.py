"""What is refused, and by which reason: one entry each, all of them in one frame."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from tests.unit.marketplace.entries import TELEMETRY, entry, envelope, line, order, uuid

from marketplace.lake import pipeline

NOT_UTF_8 = json.dumps(envelope(63, order(), more="?")).encode().replace(b'"?"', b'"\xff"')
OVERFLOWING = {**line(qty=10**10, price=10**10), "line_total_cents": 0}


def created(number: int, data, **changes):
    return entry(number, "order_created", envelope(number, data, **changes))


def touch(number: int, type: str = "ad_impression", **changes):
    names = ("token_id", "ad_id", "vendor_store_id", "buyer_store_id", "target_id")
    data = {name: uuid(place) for place, name in enumerate(names, 900)}
    data |= {"placement": "top", "target_type": "store", **changes}
    return entry(number, type, envelope(number, data), stream=TELEMETRY)


def rollup(number: int, **changes):
    data = {name: uuid(900) for name in ("ad_id", "vendor_store_id")}
    counts = {"impressions": 1, "clicks": 0, "spend_micros": 5, "rollup_revision": 1}
    data |= {"timezone": "America/Chicago", **counts, **changes}
    return entry(number, "ad_daily_rollup_ready", envelope(number, data))


CASES = [
    ("", created(1, order())),
    ("", created(2, order(later_field={"a": [1]}))),
    ("", created(3, order(), actor={"type": "user", "id": "u"}, more=1)),
    ("", created(4, order(), occurredAt="2026-03-07T06:00:00.123456789-06:00")),
    ("malformed_entry", entry(5, "order_created", b"{}", _malformed="no id")),
    ("malformed_entry", entry(6, "order_created", b"{}", event_id=None)),
    ("malformed_entry", entry(7, "", b"{}")),
    ("broken_json", entry(8, "order_created", json.dumps(envelope(8, order())).encode()[:-9])),
    ("broken_json", entry(9, "order_created", b"[]")),
    ("broken_json", entry(10, "order_created", b"7")),
    ("broken_json", entry(11, "order_created", b'{"version": "\xff"}')),
    ("broken_json", entry(12, "order_created", b"")),
    ("bad_envelope", created(13, order(), version=0)),
    ("bad_envelope", created(14, order(), version="1")),
    ("bad_envelope", created(15, order(), version=1.5)),
    ("bad_envelope", created(16, order(), eventId=uuid(99))),
    ("bad_envelope", created(17, order(), occurredAt="2026-02-30T00:00:00Z")),
    ("bad_envelope", created(18, order(), occurredAt="2026-03-01")),
    ("bad_envelope", created(19, order(), occurredAt=...)),
    ("unknown_type", entry(20, "checkout_converted", envelope(20, {}))),
    ("unknown_type", entry(21, "ad_click", envelope(21, {}))),  # on the topic of the domain
    ("unknown_version", created(22, order(), version=2)),
    ("unknown_version", created(23, order(), version=2**40)),
    ("null_data", created(24, None)),
    ("null_data", created(25, ...)),
    ("invalid_data", created(26, {})),
    ("invalid_data", created(27, [1])),
    ("invalid_data", created(28, order(total_cents="1100"))),
    ("invalid_data", created(29, order(tax_cents=-1))),
    ("invalid_data", created(30, order(order_id="7"))),
    ("invalid_data", created(31, order(payment_method="shells"))),
    ("invalid_data", created(32, order(currency="usd"))),
    ("invalid_data", created(33, order(ship_to={}))),
    ("invalid_data", created(34, order(lines=[None]))),
    ("invalid_data", created(35, order(lines=[{**line(), "qty": 0}]))),
    ("invalid_data", created(36, order(lines=...))),
    ("wrong_amounts", created(37, order(total_cents=1))),
    ("wrong_amounts", created(38, order(lines=[{**line(), "line_total_cents": 1}]))),
    ("wrong_amounts", created(39, order(lines=[]))),
    ("wrong_amounts", created(40, order(OVERFLOWING, subtotal_cents=0, total_cents=100))),
    ("", created(64, order(), actor="till")),  # an actor of another form is left out
    ("wrong_amounts", created(65, order(total_cents=1), actor="till")),
    ("", touch(41)),
    ("", touch(42, "ad_click", impression_token_id=uuid(900))),
    ("invalid_data", touch(43, "ad_click")),
    ("invalid_data", touch(44, target_type="planet")),
    ("unknown_type", touch(45, "order_created")),
    # What would end every run from then on: a year that Python has not, a sum past 64 bits.
    ("bad_envelope", created(46, order(), occurredAt="0000-01-01T00:00:00Z")),
    ("bad_envelope", created(47, order(), occurredAt="9999-12-31T23:59:59-18:00")),
    ("", created(48, order(), occurredAt="1970-01-01T00:00:00Z")),
    ("invalid_data", created(49, order(line(qty=1, price=2**62), tax=0, transport=0))),
    ("", entry(50, "order_created", envelope(50, order()), time=datetime(1, 1, 1, tzinfo=UTC))),
    ("broken_json", entry(51, "order_created", json.dumps(envelope(51, order())).encode() + b"x")),
    ("broken_json", entry(52, "order_created", json.dumps(envelope(52, order())).encode() * 2)),
    ("", entry(53, "order_created", json.dumps(envelope(53, order())).encode() + b" \n")),
    ("broken_json", entry(54, "order_created", json.dumps(envelope(54, order())).encode() + b"]")),
    ("broken_json", entry(55, "order_created", b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}")),
    ("bad_envelope", entry(56, "order_created", b'{"x":' + b"9" * 5000 + b"}")),
    ("bad_envelope", created(57, order(), occurredAt="2026-03-07T12:00:00Z\n")),
    ("invalid_data", created(58, order(order_id=uuid(101) + "\n"))),
    ("", created(59, order(currency="USD\n"))),  # as Python's `$`, and so the producers, have it
    ("broken_json", entry(63, "order_created", NOT_UTF_8)),
    ("", rollup(60, day="9999-12-31")),
    ("invalid_data", rollup(61, day="0000-03-07")),
    ("invalid_data", rollup(62, day="2026-02-30")),
]


def test_the_first_check_that_fails_is_the_reason() -> None:
    tables = pipeline.local([one for _, one in CASES])
    refused = {row["entry_id"]: row for row in tables["events_quarantine"]}
    found = {
        one["entry_id"]: refused.get(one["entry_id"], {}).get("reason", "") for _, one in CASES
    }
    assert found == {one["entry_id"]: reason for reason, one in CASES}
    assert refused["1008-0"]["version"] is None  # though it begins with a version
    assert refused["1022-0"]["version"] == 2
    assert refused["1023-0"]["version"] is None
    events = {row["entry_id"]: row for row in tables["events"]}
    assert events["1050-0"]["created_at"] is None
    touches = ("1041-0", "1042-0")
    assert events.keys() == {
        one["entry_id"] for reason, one in CASES if not reason and one["entry_id"] not in touches
    }
    assert [row["entry_id"] for row in tables["ad_click"]] == ["1042-0"]
