"""What waits for its time: delayed events, retries of a log, schedules; and their buttons."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from conquiet import App, Message
from conquiet.errors import TryLater
from conquiet.redis import Outbox as RedisOutbox
from conquiet.sql import LogSource, Outbox
from tests.web import shop as shops
from tests.web.browsing import Browser
from tests.web.test_actions import form_of
from tests.web.test_pages import text_of

HOUR = timedelta(hours=1)


def event(id_: str, type_: str = "payment.due") -> Message[Any]:
    return Message({"order": id_}, {"id": id_, "type": type_, "source": "/shop", "subject": "c-1"})


@pytest.fixture
def delayed(shop) -> None:
    with shop.engine.begin() as transaction:
        Outbox("orders").add(transaction, [event("d-1"), event("d-2", "<late>")], after=HOUR)
    with shop.client.pipeline() as pipe:
        RedisOutbox("mails", "conquiet:outbox:shop").add(pipe, [event("r-1")], after=HOUR)
        pipe.execute()


def test_nothing_that_waits_is_said(client, shop) -> None:
    found = text_of(client.get("/later"))
    assert "Nothing is delayed." in found
    assert "Nothing in the database waits for a later try." in found
    assert "--app shop:app" in found


def test_delayed_events_are_shown_with_their_time(client, delayed) -> None:
    found = text_of(client.get("/later"))
    assert "2 in table outbox" in found
    assert "1 in stream conquiet:outbox:shop" in found
    assert "d-2 &lt;late&gt; orders c-1 in " in found
    assert "r-1 payment.due mails c-1 in " in found
    assert "59 min 5" in found


def test_delayed_events_of_streams_that_are_not_to_be_shown_are_not(make, delayed) -> None:
    assert "r-1" not in text_of(Browser(make(streams="orders*")).get("/later"))


def test_a_delayed_event_is_traced(client, delayed) -> None:
    found = text_of(client.get("/trace", params={"id": "d-1"}))
    assert re.search(
        "delayed payment.due in outbox written (?:now|[.0-9]+ s ago) , due in [a-z0-9 ]+ :"
        " see Later",
        found,
    )


def test_delayed_events_are_found_by_type_and_id(client, delayed) -> None:
    found = text_of(client.get("/later", params={"type": "payment.*"}))
    assert "2 in table outbox, 1 shown" in found
    assert "d-2" not in found
    found = text_of(client.get("/later", params={"id": "r-1"}))
    assert "None of 2 in table outbox fits." in found
    assert "r-1 payment.due" in found


@pytest.mark.parametrize(("id_", "stream"), [("d-1", ""), ("r-1", "conquiet:outbox:shop")])
def test_cancelling_asks_first_and_says_if_it_is_too_late(client, delayed, id_, stream) -> None:
    page = client.get("/later/cancel", params={"id": id_, "stream": stream})
    assert f"Cancel the delayed event {id_}?" in page.text
    assert f"{id_} payment.due" in text_of(client.get("/later"))
    form = form_of(page, "/later/cancel")
    done = text_of(client.post("/later/cancel", data=form))
    assert f"{id_} is cancelled." in done
    assert f"{id_} payment.due" not in done
    assert "too late" in text_of(client.post("/later/cancel", data=form))


def test_retries_of_a_log_are_tried_now_or_never(client, shop) -> None:
    shop.write(2)
    with closing(LogSource(shop.engine, "orders", "billing")) as source:
        source.allow_delays(2, ordered=False)
        first, second = source.read(10, 5.0)
        for message in (first, second):
            message.nack(TryLater(3_600, ValueError("no <stock>")))
        page = client.get("/later")
        found = text_of(page)
        assert "Group billing of topic orders" in found
        assert f"{first.id} order.placed in " in found
        assert "1 ValueError: no &lt;stock&gt;" in found
        done = client.post("/retries/now", data=form_of(page, "/retries/now"))
        assert "The message is tried now." in done.text
        [again] = source.read(10, 30.0)
        assert (again.id, again.deliveries) == (first.id, 2)
        again.nack(TryLater(7_200, KeyError("<sku>")))
        page = client.get("/later")
        found = text_of(page)
        assert "2 errors 1: ValueError: no &lt;stock&gt; " in found
        assert "2: KeyError: &#39;&lt;sku&gt;&#39; " in found
        form = form_of(page, "/retries/never")
        assert "is a dead letter now" in client.post("/retries/never", data=form).text
        assert "nothing was done" in client.post("/retries/never", data=form).text
    with shop.engine.connect() as connection:
        query = text("SELECT count(dead_at) FROM outbox_retries")
        assert connection.execute(query).scalar_one() == 1


def test_on_postgresql_and_with_the_table_of_domain_events(make, database_url, redis_url) -> None:
    with shops.opened(database_url, redis_url) as shop:
        with shop.engine.begin() as transaction:
            Outbox("orders").add(transaction, [event("d-1")], after=HOUR)
        [id_] = shop.write(1)
        with closing(LogSource(shop.engine, "orders", "billing")) as source:
            source.allow_delays(2, ordered=False)
            [message] = source.read(10, 5.0)
            message.nack(TryLater(3_600, ValueError("no stock")))
        client = Browser(make(database=database_url))
        page = client.get("/later")
        assert "d-1 payment.due orders c-1 in " in text_of(page)
        assert f"{id_} order.placed in " in text_of(page)
        done = client.post("/retries/never", data=form_of(page, "/retries/never"))
        assert "is a dead letter now" in done.text
        form = form_of(client.get("/later/cancel", params={"id": "d-1"}), "/later/cancel")
        assert "d-1 is cancelled." in text_of(client.post("/later/cancel", data=form))
        events = Browser(make(database=database_url, table="outbox_events"))
        assert "Nothing is delayed." in text_of(events.get("/later"))


@pytest.fixture(params=["sqlite", "redis"])
def app(request, shop):
    made = App("shop", shop.database if request.param == "sqlite" else shop.redis)

    @made.every(hours=1, name="<rates>")
    def fetch_rates() -> None: ...

    yield made
    made.store.close()


def test_schedules_are_shown_paused_resumed_and_run(make, app) -> None:
    client = Browser(make(app=app))
    assert "&lt;rates&gt; every 1 h new" in text_of(client.get("/later"))

    def act(verb: str) -> str:
        form = form_of(client.get("/later"), f"/schedules/{verb}")
        return text_of(client.post(f"/schedules/{verb}", data=form))

    assert "&lt;rates&gt; is paused." in act("pause")
    assert "every 1 h paused in " in text_of(client.get("/later"))
    assert "&lt;rates&gt; is active." in act("resume")
    assert "every 1 h active in " in text_of(client.get("/later"))
    assert "is in the log; a worker of the app handles it." in act("run")
    unknown = {**form_of(client.get("/later"), "/schedules/run"), "name": "other"}
    assert client.post("/schedules/run", data=unknown).status_code == 404


def test_schedules_are_not_changed_without_the_token_of_a_form_or_read_only(make, app) -> None:
    client, reader = Browser(make(app=app)), Browser(make(app=app, read_only=True))
    assert 'method="post"' not in reader.get("/later").text
    form = form_of(client.get("/later"), "/schedules/pause")
    for verb in ("pause", "resume", "run"):
        forged = client.post(f"/schedules/{verb}", data={**form, "csrf": "0" * 64})
        assert forged.status_code == 403
        assert reader.post(f"/schedules/{verb}", data=form).status_code == 403
    assert "every 1 h new" in text_of(client.get("/later"))


def test_a_stale_schedule_has_no_buttons(make, app, shop) -> None:
    app.schedules.register()
    later = App("shop", shop.redis if "redis:" in repr(app.store) else shop.database)
    text_ = text_of(Browser(make(app=later)).get("/later"))
    assert "&lt;rates&gt; every 1 h stale" in text_
    assert "conquiet schedule forget" in text_
    later.store.close()


def test_a_store_that_is_out_of_reach_leaves_the_others(make, shop, delayed) -> None:
    client = Browser(make(broker="redis://127.0.0.1:1/0"))
    found = text_of(client.get("/later"))
    assert "Redis does not answer" in found
    assert "2 in table outbox" in found
