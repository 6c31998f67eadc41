"""Every page, without a browser: what it shows, and what it says if there is nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
from sqlalchemy import text

from conquiet import App
from conquiet.redis import Readers
from conquiet.web.guard import HEADERS
from conquiet.web.pulse import Cached, Pulse
from conquiet.web.stores import Stores
from tests.web.browsing import Browser


def text_of(answer) -> str:
    """The words of a page."""
    assert answer.status_code == 200, answer.text
    return " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())


def test_the_overview_counts_and_says_what_needs_somebody(client, ids) -> None:
    text = text_of(client.get("/"))
    assert "3 rows of the outbox used up the attempts" in text
    assert "3 dead letters in 1 place" in text
    assert "dead 3" in text
    assert "Outbox waiting 4 rows" in text
    assert "Lag 8 unread" in text
    assert "In flight 5 unacked" in text
    assert "Processes 2 alive" in text


def test_an_empty_shop_says_so_on_every_page(client, shop) -> None:
    assert "Nothing needs attention" in text_of(client.get("/"))
    assert "No group reads a stream yet" in text_of(client.get("/"))
    assert "No stream is called" in text_of(client.get("/streams"))
    assert "Nothing waits" in text_of(client.get("/outbox"))
    assert "No row is parked" in text_of(client.get("/outbox?state=parked"))
    assert "No dead letters." in text_of(client.get("/dead-letters"))
    assert "No worker is known to run" in text_of(client.get("/processes"))


def test_streams_and_groups_show_who_has_what(client, ids) -> None:
    text = text_of(client.get("/streams"))
    assert re.search(
        r"orders 8 [–\d.]+(/s)? [\d.]+ kB .* billing 1 alive shipping 1 alive 3 5 5 0", text
    )
    text = text_of(client.get("/stream", params={"name": "orders"}))
    assert ids["published"] in text
    text = text_of(client.get("/group", params={"stream": "orders", "name": "billing"}))
    assert re.search(r"billing-1 alive 5 ", text)
    assert "Delivered, and not acked" in text
    assert re.search(
        r"order\. ?placed \{&#34;order&#34;:&#34;o-0&#34;, &#34;amount&#34;:4200\}", text
    )


def test_long_lists_are_paged(client, shop) -> None:
    shop.publish([f"e-{n}" for n in range(120)])
    shop.take(120)
    shop.write(120)

    def pages(path: str, pattern: str) -> list[str]:
        seen, count = [], 0
        while path:
            answer = client.get(path)
            seen += re.findall(pattern, answer.text)
            found = re.search(r'href="([^"]+)">Next page', answer.text)
            path = found[1].replace("&amp;", "&") if found else ""
            count += 1
        assert count == 3
        return seen

    entries = pages("/stream?name=orders", r"<code>(e-\d+)</code>")
    assert entries == [f"e-{n}" for n in reversed(range(120))]
    pending = pages("/group?stream=orders&name=billing", r"<code>(\d+-\d+)</code></a></th>")
    assert len(pending) == len(set(pending)) == 120
    rows = pages("/outbox", r'href="/outbox/row\?id=(\d+)"')
    assert rows == [str(n) for n in range(1, 121)]
    newest = pages("/outbox?state=any&type=order.*", r'href="/outbox/row\?id=(\d+)"')
    assert newest == rows[::-1]


def test_streams_are_paged_and_the_rest_of_what_is_many_is_counted(client, shop) -> None:
    pipe = shop.client.pipeline(transaction=False)
    for n in range(230):
        pipe.xadd(f"s-{n:03}", {"a": "1"})
        pipe.xgroup_create(f"s-{n:03}", "group", "0")
        pipe.xreadgroup("group", f"worker-{n:03}", {f"s-{n:03}": ">"}, count=1)
        pipe.xadd(f"s-{n:03}", {"a": "2"})
    pipe.execute()
    seen = []
    path = "/streams"
    while path:
        text = client.get(path).text
        seen += re.findall(r'href="/stream\?name=(s-\d+)"', text)
        found = re.search(r'href="([^"]+)">Next page', text)
        path = found[1] if found else ""
    assert seen == [f"s-{n:03}" for n in range(230)]
    assert "30 processes more" in client.get("/processes").text
    assert "218 groups more" in client.get("/").text


def test_dead_letters_are_paged_too(client, shop) -> None:
    shop.publish([f"e-{n}" for n in range(60)])
    shop.bury(60)
    first = client.get("/dead-letters").text
    found = re.search(r'href="([^"]+)">Next page', first)[1].replace("&amp;", "&")
    seen = re.findall(r"<code>(e-\d+)</code>", first + client.get(found).text)
    assert seen == [f"e-{n}" for n in range(60)]


def test_an_entry_shows_its_payload_and_attributes(client, shop, ids) -> None:
    [(entry, _)] = shop.client.xrange("orders", count=1)
    text = text_of(client.get("/entry", params={"stream": "orders", "id": entry.decode()}))
    assert "&#34;amount&#34;: 4200" in text
    assert "specversion 1.0" in text
    shop.client.xadd("plain", {b"a": b"\xff", "data": b"\x00\xff"}, id="5-1")
    text = text_of(client.get("/entry", params={"stream": "plain", "id": "5-1"}))
    assert "no CloudEvent" in text
    assert "Not text: shown as base64" in text


SEARCHES = [
    ({}, 7),
    ({"state": "parked"}, 3),
    ({"state": "published"}, 8),
    ({"state": "any", "type": "order.p*"}, 11),
    ({"error": "TOO LARGE"}, 3),
    ({"attempts": "10"}, 3),
    ({"aggregate": "o-3"}, 1),
    ({"state": "nonsense", "attempts": "x"}, 7),
    ({"id": "nobody"}, 0),
]


def test_rows_of_the_outbox_are_searched(client, ids) -> None:
    for search, count in SEARCHES:
        answer = client.get("/outbox", params=search)
        assert answer.status_code == 200
        assert answer.text.count("/outbox/row?id=") == count, search


def test_a_list_of_rows_shows_the_beginning_of_each_payload(client, shop) -> None:
    shop.write(1, note="é" * 400)  # whose characters are cut in the middle
    [binary] = shop.write(1)
    with shop.engine.begin() as connection:
        statement = text("UPDATE outbox SET data = x'ff00' WHERE event_id = :id")
        connection.execute(statement, {"id": binary})
    found = text_of(client.get("/outbox"))
    assert "{&#34;order&#34;:&#34;o-0&#34;, &#34;amount&#34;:4200" in found
    assert "ééé …" in found
    assert "not text" in found


def test_a_row_shows_its_payload_and_error(client, ids) -> None:
    text = text_of(client.get("/outbox/row", params={"id": ids["parked"]}))
    assert "message too large" in text
    assert "&#34;currency&#34;: &#34;EUR&#34;" in text
    assert "Retry" in text
    assert "Retry" not in text_of(client.get("/outbox/row", params={"id": ids["waiting"]}))


FILTERS = [
    ({}, 3),
    ({"type": "order.*", "source": "/sh?p"}, 3),
    ({"error": "lookuperror"}, 3),
    ({"error": "timeout"}, 0),
    ({"since": "2020-01-01T00:00"}, 3),
    ({"until": "2020-01-01T00:00", "since": "nonsense"}, 0),
]


def test_dead_letters_are_filtered(client, ids) -> None:
    for search, count in FILTERS:
        answer = client.get("/dead-letters", params={"stream": "dead", **search})
        assert answer.text.count("/dead-letters/letter?") == count, search


def test_a_dead_letter_shows_payload_and_traceback(client, ids) -> None:
    params = {"stream": "dead", "id": ids["published"]}
    text = text_of(client.get("/dead-letters/letter", params=params))
    assert "LookupError: no such customer" in text
    assert "Traceback (most recent call last)" in text
    assert "&#34;amount&#34;: 4200" in text


def test_one_event_is_traced_from_the_outbox_to_its_consumers(client, ids) -> None:
    text = text_of(client.get("/trace", params={"id": ids["published"]}))
    for word in ("order.placed in outbox", "in orders", "billing in flight billing-1", "in dead"):
        assert word in text
    text = text_of(client.get("/trace", params={"id": "nobody"}))
    assert "Nothing was found about nobody" in text
    assert client.get("/trace", params={"id": "nobody", "full": "1"}).status_code == 200


def test_relays_are_seen_by_their_sessions(make, database_url) -> None:
    from conquiet.sql import engine

    made = engine(database_url, connect_args={"application_name": "conquiet-relay"})
    with made.connect():
        text = text_of(Browser(make(database=database_url)).get("/processes"))
    made.dispose()
    assert "conquiet-relay" in text
    assert "conquiet-dashboard" not in text


def test_no_field_makes_a_page_long_and_no_list_loads_whole_entries(make, shop) -> None:
    big = "x" * 2_000_000
    event = {"specversion": "1.0", "id": big, "type": big, "source": big, "data": big, "more": big}
    entry = shop.client.xadd("orders", event).decode()
    shop.client.xadd("dead", {**event, "deadreason": big, "deadtraceback": big}).decode()
    shop.client.xgroup_create("orders", "billing", "0")
    shop.client.xadd("orders", event)
    Readers(shop.client, "orders").register("spark", entry)  # its lag is counted, entry by entry
    [letter] = [id_.decode() for id_, _ in shop.client.xrange("dead")]
    [id_] = shop.write(1, big)
    shop.mark([id_], "parked_at", attempts=3, error=big)
    client = Browser(make())
    for path, params, is_list in [
        ("/", {}, True),
        ("/streams", {}, True),
        ("/stream", {"name": "orders"}, True),
        ("/group", {"stream": "orders", "name": "billing"}, True),
        ("/processes", {}, True),
        ("/dead-letters", {"stream": "dead"}, True),
        ("/dead-letters/drop", {"stream": "dead"}, True),
        ("/outbox", {}, True),
        ("/outbox/row", {"id": id_}, False),
        ("/entry", {"stream": "orders", "id": entry}, False),
        ("/dead-letters/letter", {"stream": "dead", "id": letter}, False),
        ("/trace", {"id": id_}, False),
    ]:
        before = shop.client.info("stats")["total_net_output_bytes"]
        answer = client.get(path, params=params)
        sent = shop.client.info("stats")["total_net_output_bytes"] - before
        assert answer.status_code == 200, path
        assert len(answer.content) < 1_000_000, path
        assert not is_list or sent < 1_000_000, path


def test_relays_are_asked_for_their_health(make, shop) -> None:
    from conquiet.health import Check, Health, HealthServer

    check = Check(dict, timeout=1)
    health = Health({"database": check}, alive=lambda: None, metrics=lambda: b"")
    server = HealthServer(health, "127.0.0.1", 0)
    addresses = [f"http://127.0.0.1:{server.port}", "http://127.0.0.1:1"]
    text = text_of(Browser(make(relays=addresses)).get("/processes"))
    server.close()
    assert f"http://127.0.0.1:{server.port} alive yes database: ok" in text
    assert "http://127.0.0.1:1 silent no" in text


def test_a_store_out_of_reach_is_told_with_the_remedy_and_the_rest_works(make, shop) -> None:
    client = Browser(make(broker="redis://127.0.0.1:1/0"))
    text = text_of(client.get("/"))
    assert "Redis does not answer" in text
    assert "conquiet doctor" in text
    assert client.get("/outbox").status_code == 200
    answer = client.get("/streams")
    assert answer.status_code == 503
    assert "127.0.0.1:1" in answer.text


def test_a_database_without_tables_or_file_names_the_command(make, tmp_path) -> None:
    missing = tmp_path / "none.sqlite"
    answer = Browser(make(database=f"sqlite:///{missing}")).get("/outbox")
    assert answer.status_code == 503
    assert "conquiet outbox migrate" in answer.text
    assert not missing.exists()
    missing.touch()
    answer = Browser(make(database=f"sqlite:///{missing}")).get("/outbox")
    assert answer.status_code == 503
    assert "conquiet outbox migrate" in answer.text


def test_a_store_that_was_not_named_says_how_to_name_it(make) -> None:
    client = Browser(make(database=None, broker=None))
    assert client.get("/").status_code == 200
    assert "--database" in client.get("/outbox").text
    assert "--broker" in client.get("/streams").text
    assert "--broker" in client.get("/processes").text
    assert client.get("/trace?id=x").status_code == 400


ODD = [
    ("/nothing", 404),
    ("/stream?name=nowhere", 404),
    ("/stream", 404),
    ("/group?stream=orders&name=nobody", 404),
    ("/entry?stream=orders&id=1-1", 404),
    ("/entry?stream=orders&id=x", 400),
    ("/stream?name=orders&before=x", 400),
    ("/stream?name=orders&before=0-0", 200),
    ("/stream?name=orders&before=99999999999999999999-0", 400),
    ("/group?stream=orders&name=billing&after=5", 200),
    ("/dead-letters?stream=dead&since=0001-01-01T00:00%2B14:00", 200),
    ("/dead-letters?stream=dead&until=9999-12-31T23:59-14:00", 200),
    ("/dead-letters?stream=dead&type=%5B&after=0", 200),
    ("/outbox/row?id=nobody", 404),
    ("/outbox/row?id=%00", 404),
    ("/outbox?id=%00&type=%25&error=%27", 200),
    ("/outbox?after=x", 200),
    ("/outbox?after=99999999999999999999999", 200),
    ("/dead-letters/letter?stream=dead&id=x", 404),
    ("/dead-letters?stream=nowhere", 200),
    ("/static/nothing.js", 404),
    ("/static/../app.py", 404),
    ("/static/%2e%2e/app.py", 404),
]


def test_what_is_not_there_is_told_in_a_page(client, ids) -> None:
    for path, status in ODD:
        answer = client.get(path)
        assert answer.status_code == status, path
        assert "Traceback" not in answer.text


def test_an_error_of_our_own_is_a_page_without_its_traceback(make, shop, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("conquiet.relay.inspection.Inspection.figures", broken)
    answer = Browser(make(), raise_server_exceptions=False).get("/outbox")
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "RuntimeError" in answer.text


ALONE = """
import sys
for name in ("redis", "sqlalchemy", "psycopg", "kombu"):
    sys.modules[name] = None
from conquiet.errors import ConfigError
from conquiet.web import Open, dashboard
from tests.web.browsing import Browser
client = Browser(dashboard(auth=Open()))
paths = ("/", "/processes", "/trace", "/streams", "/stream?name=x", "/outbox", "/dead-letters")
print([client.get(path).status_code for path in paths])
for store in ("broker", "database"):
    try:
        dashboard(auth=Open(), **{store: f"{store.replace('database', 'sqlite')}:///x"})
    except ConfigError as error:
        print(error)
"""


def test_it_starts_with_the_packages_of_its_own_extra_alone() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    codes, no_redis, no_sql = run.stdout.splitlines()
    assert codes == "[200, 200, 200, 404, 404, 404, 404]"
    assert "redis is not installed: pip install 'conquiet[redis]'" in no_redis
    assert "sqlalchemy is not installed: pip install 'conquiet[sql]'" in no_sql


def test_rates_are_what_changed_between_two_samples(shop, monkeypatch) -> None:
    pulse = Pulse(Stores(None, shop.redis))
    monkeypatch.setattr("conquiet.web.pulse._GAP_SECONDS", 1e9)
    shop.publish(["a", "b"])
    messages = shop.take(2)
    pulse._take()
    assert pulse.history[-1].coming is None
    shop.publish([f"e-{n}" for n in range(10)])
    shop.publish(["x"], stream="new")  # what was not there before is no traffic
    for message in messages:
        message.ack()
    assert pulse._stores.client.xpending("orders", "billing")["pending"] == 0
    pulse._last = type(pulse._last)(**{**vars(pulse._last), "at": pulse._last.at - 10})
    before = pulse._last.at
    pulse._take()
    seconds = pulse._last.at - before
    assert pulse.history[-1].coming == pytest.approx(10 / seconds)
    assert pulse.history[-1].handled == pytest.approx(2 / seconds)
    assert pulse.history[-1].lag == 10


def test_a_history_is_bounded_and_begins_anew_after_a_gap(monkeypatch) -> None:
    pulse = Pulse(Stores(None, None))
    for _ in range(70):
        pulse._take()
    assert len(pulse.history) == 60
    monkeypatch.setattr("conquiet.web.pulse._GAP_SECONDS", -1)
    pulse._take()
    assert len(pulse.history) == 1


def test_who_comes_while_a_look_is_taken_gets_the_former() -> None:
    going, may_end = threading.Event(), threading.Event()

    def slow() -> str:
        going.set()
        assert may_end.wait(10)
        return "new"

    look = Cached(lambda: "old", seconds=-1)
    assert look() == "old"
    look._take = slow
    thread = threading.Thread(target=look)
    thread.start()
    assert going.wait(10)
    assert look() == "old"
    may_end.set()
    thread.join()
    look._take = lambda: "newer"
    assert look._last == ("new",)


def test_a_look_is_taken_once_however_many_ask() -> None:
    taken = []
    look = Cached(lambda: taken.append(1), seconds=60)
    for _ in range(5):
        look()
    assert taken == [1]


@dataclass
class Item:
    article: str
    pieces: int | None = None


@dataclass
class PlaceOrder:
    id: str
    items: list[Item]
    note: str = ""


def test_the_interface_of_an_app_is_a_page(make, client, tmp_path) -> None:
    app = App("<shop>", f"sqlite:///{tmp_path}/app.sqlite")

    @app.on
    def place_order(order: PlaceOrder) -> Item: ...

    assert client.get("/interface").status_code == 404
    assert "Interface" not in client.get("/").text
    shown = Browser(make(app=app))
    answer = shown.get("/interface")
    assert "<shop>" not in answer.text
    assert "place.order &lt;shop&gt; place_order id string items list of Item" in text_of(answer)
    assert "item &lt;shop&gt; send.item article string pieces integer or null optional" in text_of(
        answer
    )
    assert shown.get("/interface.json").json() == app.describe()
    assert "Interface" in shown.get("/").text
    app.engine.dispose()
