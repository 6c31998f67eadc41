"""The pages of handlers and streams, the charts, and the count of processes."""

from __future__ import annotations

import re
import time

import pytest
from sqlalchemy import text as text_sql

from conquiet import Router, Worker
from conquiet.message import Message
from conquiet.operations.history import RedisKeeper, record
from conquiet.redis import StreamSource
from conquiet.web.chart import WINDOWS, Past, draw, nice_top
from tests.waiting import eventually
from tests.web.browsing import Browser
from tests.web.test_pages import text_of


def test_the_slowest_handler_comes_first_unless_another_order_is_chosen(client, shop) -> None:
    shop.remember(30)
    names = r'href="/handler\?name=(\w+)'
    slowest = re.findall(names, client.get("/handlers?window=10m").text)
    assert slowest == [
        "export_invoice_to_the_accounting_system",
        "send_receipt",
        "charge_card",
        "place_order",
        "update_stock",
    ]
    failing = re.findall(names, client.get("/handlers?window=10m&sort=errors").text)
    assert failing[0] == "send_receipt"
    text = text_of(client.get("/handlers?sort=nonsense&window=nonsense"))
    assert "5 handlers in the last 1 h, by p95" in text


def test_a_handler_shows_its_figures_charts_and_dead_letters(client, shop, ids) -> None:
    shop.remember(30)
    query = {"name": "charge_card", "type": "order.placed", "window": "10m"}
    answer = client.get("/handler", params=query)
    text = text_of(answer)
    assert re.search(r"Rate \d+/s p50 \d+ ms p95 1\d\d ms Busy \d+ % Errors \d+", text)
    assert "Duration of a call" in text
    assert answer.text.count('<path class="line') == 6
    assert answer.text.count("<rect") == 30  # three charts of ten minutes
    assert "LookupError: no such customer" in text  # by its type: the letter names no handler
    none = text_of(client.get("/handler", params={"name": "unknown"}))
    assert "No dead letter of this handler" in none


def test_every_step_of_a_chart_has_a_title_and_the_axes_have_units(client, shop) -> None:
    shop.remember(120)
    answer = client.get("/?window=1h")
    assert re.search(
        r"<title>\d\d:\d\d · handled [\d.]+, published [\d.]+ messages/s</title>", answer.text
    )
    assert answer.text.count("<rect") == 180
    assert '<time datetime="20' in answer.text
    assert "handled" in text_of(answer)
    for window in WINDOWS:
        assert client.get("/", params={"window": window.name}).text.count("<rect") >= 30


def test_without_a_history_pages_say_who_would_write_one(client, shop) -> None:
    assert "No handler has reported" in text_of(client.get("/handlers"))
    assert text_of(client.get("/")).count("Nothing was reported in this time") == 3


def test_a_missing_table_is_told_and_the_rest_works(make, shop, redis_client) -> None:
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE outbox_history")
    text = text_of(Browser(make()).get("/"))
    assert "no such table: outbox_history" in text
    assert "Outbox waiting 0 rows" in text


def test_an_axis_without_values_is_not_drawn() -> None:
    assert draw("Rate", "/s", Past(WINDOWS[0]), []).columns == ()
    assert [nice_top(value) for value in (0.9, 1, 1.1, 79, 81, 2_500)] == [1, 1, 2, 80, 100, 4_000]


@pytest.fixture
def workers(shop):
    """Two workers of one group over three streams, and a third one, each as a process reports."""
    started = []
    for name in ("web-1", "web-2", "web-3"):
        router = Router()

        @router.raw(type="order.placed", name="charge_card")
        def charge_card(message: Message[bytes]) -> None: ...

        source = StreamSource(shop.client, ["orders", "payments", "refunds"], "billing", name)
        worker = Worker(source, router)
        recorder = record([worker])
        assert recorder is not None
        worker.start()
        started.append((worker, recorder))
    yield [recorder for _, recorder in started]
    for worker, _ in started:
        worker.stop()


def test_three_processes_are_three_however_many_streams_they_read(make, shop, workers) -> None:
    for stream in ("orders", "payments", "refunds"):
        shop.publish([f"{stream}-{n}" for n in range(6)], stream=stream)
    keeper = RedisKeeper(shop.client)
    for recorder in workers:
        recorder.write()

    def handled() -> float:
        for recorder in workers:
            recorder.write()
        return sum(
            entry.value
            for entry in keeper.read(5, kind="handler").entries
            if entry.key.figure == "ok"
        )

    eventually(lambda: handled() == 18)
    client = Browser(make())
    assert "Processes 3 alive" in text_of(client.get("/"))
    text = text_of(client.get("/processes"))
    assert "3 processes alive" in text
    assert text.count("web-1 alive worker billing of orders billing of payments") == 1
    assert "name=charge_card&amp;type=order.placed" in client.get("/handlers").text
    workers[0].write("ended")
    workers[1].write("ended")


def test_a_process_that_stopped_without_saying_so_needs_attention(client, shop) -> None:
    now = time.time()
    with shop.engine.begin() as connection:
        for name, ago in (("web-1-41", 0), ("web-2-17", 100)):
            connection.execute(
                text_sql(
                    "INSERT INTO outbox_history"
                    " VALUES (:minute, 'process', :name, 'worker', 'seen', :seen)"
                ),
                {"minute": int((now - ago) // 60), "name": name, "seen": now - ago},
            )
    text = text_of(client.get("/"))
    assert "Processes 1 alive 1 silent" in text
    assert "1 process stopped without saying so" in text
    assert re.search(r"web-2-17 1 min \d+ s ago", text)
    assert "1 process alive, 1 silent" in text_of(client.get("/processes"))


def test_streams_of_celery_and_of_retries_are_folded_away(client, shop) -> None:
    shop.publish(["a"], stream="orders")
    for name in ("conquiet:kombu:q:0:celery", "shop:conquiet:again:{orders}:billing"):
        shop.client.xadd(name, {"a": "1"})
        shop.client.xgroup_create(name, "workers", "0")
        shop.client.xreadgroup("workers", f"of-{name}", {name: ">"})
    text = text_of(client.get("/streams"))
    assert "1 stream, by name" in text
    assert "2 internal streams" in text
    assert "3 streams, by name" in text_of(client.get("/streams?all=1"))
    assert "1 stream, by name" in text_of(client.get("/streams?q=celery"))
    assert "Processes 0 alive" in text_of(client.get("/"))


def test_queues_of_celery_are_shown_with_what_is_ready_and_who_reads(client, shop) -> None:
    first, _ = shop.enqueue("mail", 5)
    shop.enqueue("reports", 0, prefix="shop:")
    shop.client.xadd("conquiet:kombu:dead:mail", {"m": "{}"})
    text = text_of(client.get("/streams"))
    assert re.search(r"Queues of Celery .* mail 5 \S+ .*s – 0 no live consumer 1 ", text)
    assert "reports of shop: 0 – – 0 0 alive 0" in text
    assert "reports" not in text_of(client.get("/streams?q=mai"))
    text = text_of(client.get("/"))
    assert "No live consumer reads 1 group or queue with a backlog" in text
    assert "queue mail 5 ready" in text
    assert "queue mail 1" in text  # its dead letters
    shop.client.xreadgroup("conquiet", "box:7:c-1", {first: ">"}, count=2)
    client.app.pulse._cached._until = 0
    text = text_of(client.get("/streams"))
    assert re.search(r"mail 3 .* 2 1 alive 1 ", text)


def test_streams_are_found_and_ordered(client, shop) -> None:
    shop.publish([f"o-{n}" for n in range(3)], stream="orders")
    shop.publish([f"p-{n}" for n in range(9)], stream="payments")
    names = r'href="/stream\?name=(\w+)"'
    assert re.findall(names, client.get("/streams").text) == ["orders", "payments"]
    assert re.findall(names, client.get("/streams?sort=entries").text) == ["payments", "orders"]
    assert re.findall(names, client.get("/streams?q=PAY").text) == ["payments"]
    assert re.findall(names, client.get("/streams?q=o*s").text) == ["orders"]
    assert "No stream matches" in text_of(client.get("/streams?q=none"))
