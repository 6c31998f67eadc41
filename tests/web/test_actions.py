"""Retry, replay and drop: what they do, who may, and what they tell."""

from __future__ import annotations

import html
import re
from contextlib import closing

import pytest
from starlette.routing import Route

from conquiet.errors import TryLater
from conquiet.redis import StreamSource
from conquiet.redis.group import GroupStream
from conquiet.redis.wire import Wire
from conquiet.sql import LogSource
from conquiet.web import Token
from tests.web.browsing import Browser
from tests.web.test_pages import text_of


def form_of(answer, action: str) -> dict[str, str]:
    """The hidden fields of the form that goes to `action`, as a browser would send them."""
    assert answer.status_code == 200, answer.text
    form = re.search(rf'<form[^>]*action="{re.escape(action)}".*?</form>', answer.text, re.S)[0]
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in found}


def test_a_parked_row_gets_new_attempts(client, shop, ids) -> None:
    page = client.get("/outbox/row", params={"id": ids["parked"]})
    done = client.post("/outbox/retry", data=form_of(page, "/outbox/retry"))
    assert done.history[0].status_code == 303
    assert f"{ids['parked']} has new attempts" in done.text
    assert "has new attempts" not in client.get("/outbox").text  # told once
    assert client.get("/outbox?state=parked").text.count("/outbox/row?id=") == 2
    again = client.post("/outbox/retry", data=form_of(page, "/outbox/retry"))
    assert "is not parked any more; nothing was done" in again.text


def test_all_parked_rows_are_retried_after_a_question(client, ids) -> None:
    page = client.get("/outbox/retry-all")
    assert "Give 3 parked rows new attempts?" in page.text
    done = client.post("/outbox/retry-all", data=form_of(page, "/outbox/retry-all"))
    assert "3 rows got new attempts" in done.text
    assert "Nothing to do" in client.get("/outbox/retry-all").text


def test_one_dead_letter_is_replayed_where_it_came_from(client, shop, ids) -> None:
    page = client.get("/dead-letters/letter", params={"stream": "dead", "id": ids["published"]})
    done = client.post("/dead-letters/replay", data=form_of(page, "/dead-letters/replay"))
    assert "1 message sent again." in done.text
    assert shop.client.xlen("dead") == 2
    [(_, fields)] = shop.client.xrevrange("orders", count=1)
    assert fields[b"id"].decode() == ids["published"]
    assert b"deadreason" not in fields


def test_letters_are_replayed_by_filter_after_a_preview(client, shop, ids) -> None:
    shop.publish(["other"], stream="carts", type_="cart.left")
    shop.bury(1, stream="carts")
    page = client.get("/dead-letters/replay", params={"stream": "dead", "type": "order.*"})
    assert "Replay 3 dead letters of dead?" in page.text
    form = form_of(page, "/dead-letters/replay")
    shop.publish(["late"], stream="late")
    shop.bury(1, stream="late")  # dies after the question, and is not what was asked about
    assert "3 messages sent again." in client.post("/dead-letters/replay", data=form).text
    left = [fields[b"id"] for _, fields in shop.client.xrange("dead")]
    assert left == [b"other", b"late"]


def test_letters_may_go_to_another_stream(client, shop, ids) -> None:
    page = client.get("/dead-letters/replay", params={"stream": "dead"})
    form = {**form_of(page, "/dead-letters/replay"), "to": "elsewhere"}
    assert "3 messages sent again." in client.post("/dead-letters/replay", data=form).text
    assert shop.client.xlen("elsewhere") == 3


@pytest.mark.parametrize("broker", ["off", "on"])
def test_dead_letters_of_a_log_are_tried_again_or_dropped(make, shop, broker) -> None:
    shop.write(60)
    with closing(LogSource(shop.engine, "orders", "b&b", max_attempts=1)) as source:
        dead = 0
        while dead < 60:
            for message in source.read(60, 5.0):
                message.nack(LookupError("no <stock>"))
                dead += 1
        client = Browser(make(broker=None) if broker == "off" else make())
        overview = text_of(client.get("/"))
        assert "60 dead letters in 1 place" in overview
        assert "group b&amp;b of orders 60" in overview
        assert "b&amp;b orders in the database 0 – – 1" in overview
        found = client.get("/dead-letters").text
        assert "group b&amp;b of orders (60)" in found
        assert "LookupError: no &lt;stock&gt;" in found
        place = re.search(r'name="stream" value="([^"]+)"', found)[1].replace("&amp;", "&")
        following = re.search(r'href="([^"]+)">Next page', found)[1].replace("&amp;", "&")
        letters = re.findall(r'name="pick" value="([^"]+)"', found + client.get(following).text)
        assert len(set(letters)) == 60
        page = client.get("/dead-letters/letter", params={"stream": place, "id": letters[0]})
        done = client.post("/dead-letters/replay", data=form_of(page, "/dead-letters/replay"))
        assert "1 message sent again." in done.text
        [again] = source.read(60, 30.0)
        again.ack()
        page = client.get("/dead-letters/replay", params={"stream": place})
        assert "Replay 59 dead letters of group b&amp;b of orders?" in page.text
        assert "other groups do not" in page.text
        assert 'name="to"' not in page.text
        page = client.get("/dead-letters/drop", params={"stream": place})
        done = client.post("/dead-letters/drop", data=form_of(page, "/dead-letters/drop"))
        assert "59 messages dropped." in done.text
    assert "No dead letters." in text_of(client.get("/dead-letters"))


def test_a_log_that_nobody_reads_needs_attention(make, shop) -> None:
    shop.write(2)
    with closing(LogSource(shop.engine, "orders", "billing")) as source:
        source.read(1, 5.0)[0].nack(None)
    found = text_of(Browser(make(broker=None)).get("/"))
    assert "No live consumer reads 1 group with a backlog" in found
    assert "billing of orders 1 unread, 1 to retry" in found


def test_dead_letters_of_celery_are_shown_and_replayed_too(make, shop) -> None:
    from conquiet.kombu.layout import Keys

    dead = Keys("shop:").dead("mail")
    message = '{"headers": {"id": "task-1", "task": "send_mail", "argsrepr": "(\'ann\',)"}}'
    shop.client.xadd(dead, {"m": message, "queue": "mail", "reason": "delivered 5 times"})
    client = Browser(make())
    assert "queue mail of shop:" in client.get("/").text
    assert "send_mail" in client.get("/dead-letters").text
    page = client.get("/dead-letters/letter", params={"stream": dead, "id": "task-1"})
    assert "ann" in page.text
    hidden = Browser(make(hide_payloads=True)).get(page.request.url.raw_path.decode())
    assert "delivered 5 times" in hidden.text
    assert "ann" not in hidden.text.replace("channel", "")
    done = client.post("/dead-letters/replay", data=form_of(page, "/dead-letters/replay"))
    assert "1 message sent again." in done.text
    assert shop.client.xlen(dead) == 0
    assert shop.client.xlen(Keys("shop:").stream("mail", 0)) == 1


def test_what_cannot_be_replayed_stays_and_says_why(client, shop) -> None:
    letter = {"specversion": "1.0", "id": "e", "type": "t", "source": "/s", "deadreason": "x"}
    shop.client.xadd("dead", letter)
    page = client.get("/dead-letters/replay", params={"stream": "dead"})
    done = client.post("/dead-letters/replay", data=form_of(page, "/dead-letters/replay"))
    assert "1 message could not be, and kept" in done.text
    assert "its origin is unknown" in done.text
    assert shop.client.xlen("dead") == 1


@pytest.mark.parametrize("word", ["since", "until"])
def test_a_time_that_is_none_means_no_letter_rather_than_all(client, shop, ids, word) -> None:
    asked = client.get("/dead-letters/drop", params={"stream": "dead", word: "yesterday"})
    assert asked.status_code == 400
    assert "is not a time; write it as 2026-01-31T12:00" in asked.text
    page = client.get("/dead-letters/drop", params={"stream": "dead"})
    form = {**form_of(page, "/dead-letters/drop"), word: "yesterday"}
    assert client.post("/dead-letters/drop", data=form).status_code == 400
    assert shop.client.xlen("dead") == 3


def test_what_waits_for_a_later_try_is_shown_and_tried_now_or_never(client, shop) -> None:
    shop.publish(["w-1", "w-2"], stream="waits")
    source = StreamSource(shop.client, "waits", "billing")
    source.allow_delays(2, ordered=False)
    for message in source.read(10, 5.0):
        message.nack(TryLater(3_600, ValueError("no <stock>")))
    where = {"stream": "waits", "name": "billing"}
    page = client.get("/group", params=where)
    assert "ValueError: no &lt;stock&gt;" in page.text
    done = client.post("/retries/now", data=form_of(page, "/retries/now"))
    assert "The message is tried now." in done.text
    [again] = source.read(10, 5.0)
    assert (again.id, again.deliveries) == ("w-1", 2)
    again.ack()
    page = client.get("/group", params=where)
    done = client.post("/retries/never", data=form_of(page, "/retries/never"))
    assert "The message is a dead letter now." in done.text
    [(_, fields)] = shop.client.xrange("waits:dead")
    assert fields[b"id"] == b"w-2"
    again = client.post("/retries/never", data=form_of(page, "/retries/never"))
    assert "It does not wait any more; nothing was done." in again.text
    assert "Waiting for a later try" not in client.get("/group", params=where).text
    source.close()


def test_dropping_asks_first_and_tells(client, shop, ids) -> None:
    page = client.get("/dead-letters/drop", params={"stream": "dead", "id": ids["published"]})
    assert "Drop 1 dead letter of dead?" in page.text
    assert "cannot be restored" in page.text
    assert shop.client.xlen("dead") == 3
    form = form_of(page, "/dead-letters/drop")
    assert "1 message dropped." in client.post("/dead-letters/drop", data=form).text
    assert shop.client.xlen("dead") == 2
    assert "No dead letter matches any more" in client.post("/dead-letters/drop", data=form).text


def test_letters_of_one_cause_are_found_and_replayed(client, shop, ids) -> None:
    shop.publish([f"late-{n}" for n in range(3)], stream="carts")
    for n in range(3):
        shop.bury(1, stream="carts", why=f"timeout of 'db-{n}' after {n}.5 s")
    page = client.get("/dead-letters", params={"stream": "dead"}).text
    assert "LookupError: timeout of … after … s" in page
    said = {"stream": "dead", "cause": "LookupError: timeout of … after … s"}
    assert client.get("/dead-letters", params=said).text.count("/dead-letters/letter?") == 3
    asked = client.get("/dead-letters/replay", params=said)
    assert "Replay 3 dead letters of dead?" in asked.text
    done = client.post("/dead-letters/replay", data=form_of(asked, "/dead-letters/replay"))
    assert "3 messages sent again." in done.text
    assert shop.client.xlen("dead") == 3


def test_selected_letters_are_dropped_and_nothing_else(client, shop, ids) -> None:
    letters = [id_.decode() for id_, _ in shop.client.xrange("dead")]
    query = {"stream": "dead", "selected": "1", "pick": letters[:2]}
    asked = client.get("/dead-letters/drop", params=query)
    assert "Drop 2 dead letters of dead?" in asked.text
    done = client.post("/dead-letters/drop", data=form_of(asked, "/dead-letters/drop"))
    assert "2 messages dropped." in done.text
    assert [id_.decode() for id_, _ in shop.client.xrange("dead")] == letters[2:]


@pytest.mark.parametrize("id_", ["", ",", "0-1"])
def test_a_selection_of_nothing_is_never_all(client, shop, ids, id_) -> None:
    query = {"stream": "dead", "selected": "1"}
    if not id_:
        assert "No dead letter was selected." in client.get("/dead-letters/drop", params=query).text
    else:
        page = client.get("/dead-letters/drop", params={**query, "pick": id_}).text
        assert "Nothing to do" in page or "names no dead letter" in page
        token = form_of(client.get("/outbox/row", params={"id": ids["parked"]}), "/outbox/retry")
        form = {"csrf": token["csrf"], "stream": "dead", "id": id_}
        client.post("/dead-letters/drop", data=form)
    assert shop.client.xlen("dead") == 3


def test_a_letter_shows_the_frames_of_the_users_code_first(client, shop, ids) -> None:
    page = client.get("/dead-letters/letter", params={"stream": "dead", "id": ids["published"]})
    assert re.search(
        r"<code>\S+tests/web/shop.py:\d+ in bury</code><pre>raise LookupError", page.text
    )
    assert page.text.index("In your code") < page.text.index("All frames")


def test_a_stream_is_trimmed_of_what_all_have_acked(client, shop, ids) -> None:
    for message in shop.take(8):  # shipping has acked three of them
        message.ack()
    asked = client.get("/stream/trim", params={"stream": "orders"})
    assert "Delete 3 entries of orders?" in asked.text
    assert "group shipping" in asked.text
    done = client.post("/stream/trim", data=form_of(asked, "/stream/trim"))
    assert "3 entries of orders deleted." in done.text
    assert shop.client.xlen("orders") == 5


def test_a_group_with_live_consumers_is_not_removed(client, shop, ids) -> None:
    query = {"stream": "orders", "name": "billing"}
    asked = client.get("/group/remove", params=query)
    assert "1 live consumer, which would fail without it" in asked.text
    token = form_of(client.get("/outbox/row", params={"id": ids["parked"]}), "/outbox/retry")
    form = {"csrf": token["csrf"], **query, "pending": "5", "position": "0-0"}
    done = client.post("/group/remove", data=form)
    assert "stop them first" in done.text
    assert len(shop.client.xinfo_groups("orders")) == 2


def test_a_group_is_removed_after_saying_what_it_had_unless_it_was_read_since(client, shop) -> None:
    shop.publish([f"e-{n}" for n in range(5)])
    shop.client.xgroup_create("orders", "old", "0")
    shop.client.xreadgroup("old", "gone", {"orders": ">"}, count=2)
    # Its consumer is not alive: its lease is over at once.
    leases = "conquiet:leases:{orders}"
    place = GroupStream(Wire(shop.client), "orders", "orders", "old", "")
    field = place.lease_field(b"gone")
    shop.client.hset(leases, field, 1)
    query = {"stream": "orders", "name": "old"}
    asked = client.get("/group/remove", params=query)
    assert "2 entries in flight and 3 unread entries" in asked.text
    form = form_of(asked, "/group/remove")
    shop.client.xreadgroup("old", "gone", {"orders": ">"}, count=1)
    assert "was read meanwhile; nothing was done" in client.post("/group/remove", data=form).text
    form = form_of(client.get("/group/remove", params=query), "/group/remove")
    assert "Group old of orders is removed." in client.post("/group/remove", data=form).text
    assert shop.client.xinfo_groups("orders") == []
    assert shop.client.hexists(leases, field) is False
    assert shop.client.xlen("orders") == 5


def test_a_consumer_is_removed_only_if_it_holds_nothing(client, shop, ids) -> None:
    query = {"stream": "orders", "name": "billing", "consumer": "billing-1"}
    asked = client.get("/consumer/remove", params=query)
    assert "5 entries in flight, which would be lost" in asked.text
    shop.client.xgroup_createconsumer("orders", "billing", "idle-1")
    query["consumer"] = "idle-1"
    form = form_of(client.get("/consumer/remove", params=query), "/consumer/remove")
    assert "Consumer idle-1 is removed." in client.post("/consumer/remove", data=form).text
    held = {**form, "consumer": "billing-1"}
    assert "nothing was done" in client.post("/consumer/remove", data=held).text
    names = [one["name"] for one in shop.client.xinfo_consumers("orders", "billing")]
    assert names == [b"billing-1"]


# --- who may ------------------------------------------------------------------------------------


def actions(app) -> list[str]:
    return [
        route.path
        for route in app.routes
        if isinstance(route, Route) and "POST" in route.methods and route.path != "/login"
    ]


EVERYTHING = {"stream": "dead", "id": ""}


FOREIGN = [
    ({"csrf": ""}, {}),
    ({"csrf": "0" * 64}, {}),
    ({}, {"origin": "https://evil.example"}),
    ({}, {"origin": "null"}),
    ({}, {"origin": "http://127.0.0.1.evil.example"}),
    ({}, {"sec-fetch-site": "cross-site"}),
    ({}, {"sec-fetch-site": "same-site"}),
]


def test_no_action_is_taken_for_another_site(make, shop, ids) -> None:
    app = make()
    client = Browser(app)
    page = client.get("/outbox/row", params={"id": ids["parked"]})
    form = {**form_of(page, "/outbox/retry"), **EVERYTHING}
    paths = actions(app)
    assert len(paths) == 10
    for path in paths:
        for change, headers in FOREIGN:
            answer = client.post(path, data={**form, **change}, headers=headers)
            assert answer.status_code == 403, (path, change, headers)
    assert shop.client.xlen("dead") == 3
    assert client.get("/outbox?state=parked").text.count("/outbox/row?id=") == 3


def test_the_token_of_a_form_is_that_of_one_session(make, ids) -> None:
    app = make(auth=Token("a-token-that-is-long-enough"))
    ann, bob = Browser(app), Browser(app)
    for client in (ann, bob):
        client.get("/login", params={"token": "a-token-that-is-long-enough"})
    form = form_of(ann.get("/outbox/retry-all"), "/outbox/retry-all")
    assert bob.post("/outbox/retry-all", data=form).status_code == 403
    assert ann.post("/outbox/retry-all", data=form).status_code == 200


def test_a_proxy_may_ask_by_another_name_if_the_public_one_was_said(make, ids) -> None:
    said = {"origin": "https://ops.example.com", "host": "127.0.0.1:8082"}
    for public, status in (("", 403), ("https://ops.example.com/c", 200)):
        client = Browser(make(public_url=public))
        form = form_of(client.get("/outbox/retry-all"), "/outbox/retry-all")
        assert client.post("/outbox/retry-all", data=form, headers=said).status_code == status


def test_actions_are_not_taken_by_a_link(make, shop, ids) -> None:
    client = Browser(make())
    for path in ("/outbox/retry", "/logout"):
        assert client.get(path).status_code in (404, 405)
    for path in ("/dead-letters/drop?stream=dead", "/dead-letters/replay?stream=dead"):
        client.get(path)
    assert shop.client.xlen("dead") == 3


def test_a_dashboard_that_only_reads_refuses_every_action_and_offers_none(make, shop, ids) -> None:
    app = make(read_only=True)
    client = Browser(app)
    token = app.signer.digest("form", "anonymous")
    for path in actions(app):
        answer = client.post(path, data={"csrf": token, **EVERYTHING})
        assert answer.status_code == 403
        assert "--read-only" in answer.text
    assert shop.client.xlen("dead") == 3
    letter = {"stream": "dead", "id": ids["published"]}
    for path, params in (
        ("/outbox", {"state": "parked"}),
        ("/outbox/row", {"id": ids["parked"]}),
        ("/dead-letters", {}),
        ("/dead-letters/letter", letter),
        ("/dead-letters/drop", letter),
        ("/outbox/retry-all", {}),
        ("/later", {}),
        ("/later/cancel", {"id": "e-1"}),
    ):
        text = client.get(path, params=params).text
        assert 'method="post"' not in text
        assert "read-only" in text


NO_FORMS = [
    (b"{}", "application/json", 415),
    (b"a=1", "multipart/form-data; boundary=x", 415),
    (b"a" * 70_000, "application/x-www-form-urlencoded", 413),
    (b"&".join(b"a%d=1" % n for n in range(50)), "application/x-www-form-urlencoded", 400),
    (b"\xff\xfe", "application/x-www-form-urlencoded", 400),
    (b"", "application/x-www-form-urlencoded", 403),
]


def test_what_is_no_form_is_refused(client) -> None:
    for body, kind, status in NO_FORMS:
        answer = client.post("/outbox/retry-all", content=body, headers={"content-type": kind})
        assert answer.status_code == status, (kind, body[:20])


def test_actions_are_logged_with_who_took_them(client, ids, caplog) -> None:
    page = client.get("/outbox/row", params={"id": ids["parked"]})
    form = form_of(page, "/outbox/retry")
    with caplog.at_level("INFO", logger="conquiet.web"):
        client.post("/outbox/retry", data=form)
    assert "/outbox/retry" in caplog.text
    assert "by anonymous from 127.0.0.1" in caplog.text
    assert form["csrf"] not in caplog.text
