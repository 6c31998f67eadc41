"""The outbox on PostgreSQL, and the table of domain events on both."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from sqlalchemy import text

from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG
from tests.web import shop as shops
from tests.web.browsing import Browser
from tests.web.test_actions import form_of

INSERT = (
    "INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json,"
    " attempt_count, last_error)"
    " VALUES (:id, :type, :kind, :aggregate, :payload, :attempts, :error)"
)


def test_the_outbox_on_postgresql(make, database_url, redis_url) -> None:
    with shops.opened(database_url, redis_url) as shop:
        parked = shop.write(60, "order.paid")
        shop.mark(parked, "parked_at", attempts=10, error="too large")
        shop.write(60)
        client = Browser(make(database=database_url))
        seen, path = [], "/outbox?state=waiting"
        while path:
            page = client.get(path).text
            seen += re.findall(r'href="/outbox/row\?id=(\d+)"', page)
            found = re.search(r'href="([^"]+)">Next page', page)
            path = found[1].replace("&amp;", "&") if found else ""
            assert page.count("{&#34;order&#34;:&#34;o-") == 20 if not path else 50
        assert len(seen) == len(set(seen)) == 120
        assert client.get("/outbox?error=LARGE&type=order.*").text.count("row?id=") == 50
        assert client.get("/outbox?id=%00&aggregate=%00").status_code == 200
        row = client.get("/outbox/row", params={"id": parked[0]})
        done = client.post("/outbox/retry", data=form_of(row, "/outbox/retry"))
        assert f"{parked[0]} has new attempts" in done.text
        assert "outbox" in client.get("/trace", params={"id": parked[0]}).text


@pytest.mark.parametrize("kind", ["sqlite_url", "database_url"])
def test_domain_events_are_shown_and_retried(make, kind, request) -> None:
    from conquiet.events import schema

    url = request.getfixturevalue(kind)
    engine = make_engine(url)
    schema.migrate(engine, CATALOG)
    one = CATALOG.declarations[0]
    ids = [str(uuid4()) for _ in range(60)]
    with engine.begin() as connection:
        for n, id_ in enumerate(ids):
            values = {"id": id_, "type": one.event_type, "kind": one.aggregate_type}
            values |= {"aggregate": str(uuid4()), "payload": '{"n": 1}'}
            values |= {"attempts": 10 if n < 3 else 0, "error": "<b>refused</b>" if n < 3 else None}
            connection.execute(text(INSERT), values)
    engine.dispose()
    client = Browser(make(database=url, table="outbox_events"))
    first = client.get("/outbox").text
    following = re.search(r'href="([^"]+)">Next page', first)[1].replace("&amp;", "&")
    second = client.get(following).text
    seen = re.findall(r'href="/outbox/row\?id=([-0-9a-f]{36})"', first + second)
    assert sorted(seen) == sorted(ids)
    assert first.count("{&#34;n&#34;: 1}") == 50
    assert client.get("/outbox?state=parked").text.count("row?id=") == 3
    row = client.get("/outbox/row", params={"id": ids[0]})
    assert "&lt;b&gt;refused" in row.text
    done = client.post("/outbox/retry", data=form_of(row, "/outbox/retry"))
    assert f"{ids[0]} has new attempts" in done.text
    assert client.get("/outbox?state=parked").text.count("row?id=") == 2
    assert "in outbox_events" in re.sub("<[^>]*>", "", client.get(f"/trace?id={ids[1]}").text)
