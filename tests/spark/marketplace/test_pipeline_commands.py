"""The commands as their user has them: a process each, from events to a page of charts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.spark.marketplace.entries import order
from tests.waiting import eventually

from conquiet.events import emit
from conquiet.sql import engine
from marketplace.catalog import CATALOG, OrderCreated
from marketplace.generator import (
    Generator,
    write_log,
    write_outbox,
    write_parquet,
)
from marketplace.oracle import Oracle
from marketplace.pipeline.tables import STORED
from marketplace.service import init

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ORDERS = "SELECT sum(revenue_cents) AS cents, count(*) AS orders FROM fact_order"


def command(*arguments: str) -> list[str]:
    told = ["conquiet", "pipeline", *arguments, "--to", "lake", "--master", "local[2]"]
    return [sys.executable, "-m", *told]


def conquiet(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True)


def lines(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_from_the_log_to_a_report(redis_client, redis_url: str, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    world = Generator(seed=5, orders=40, days=3, faults="all")
    count = write_log(redis_client, world.entries(oracle))

    run = conquiet(
        *("run", "--url", redis_url, "--streams", "pf-*", "--tables", "all", "--once", "--json"),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert sum(line["events"] for line in lines(run)) == count
    assert [line["batch"] for line in lines(run)] == list(range(len(lines(run))))
    assert all(line["events_per_second"] > 0 for line in lines(run))
    assert lines(run)[-1]["lag"] == 0

    show = conquiet("show", "fact_order", "--sql", ORDERS, "--json", cwd=tmp_path)
    orders = oracle.rows("fact_order")
    cents = sum(row["revenue_cents"] for row in orders)
    assert lines(show) == [{"cents": cents, "orders": len(orders)}]

    found = conquiet("reconcile", "--json", cwd=tmp_path)
    wrong = oracle.rows("recon_money")
    assert found.returncode == (1 if wrong else 0)
    assert {(row["order_id"], row["problem"], *row["event_ids"]) for row in lines(found)} == {
        (row["order_id"], row["problem"], *row["event_ids"]) for row in wrong
    }

    days = conquiet("replay", "--since", "2026-03-01", "--until", "2026-03-03", cwd=tmp_path)
    assert (days.returncode, "2 days made again" in days.stderr) == (0, True)
    assert lines(conquiet("show", "--sql", ORDERS, "--json", cwd=tmp_path)) == lines(show)

    page = conquiet("report", "--output", "page.html", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") >= 5
    assert not re.search(r"""(src|href)=["']?http""", text)  # it needs no network


def test_what_does_not_agree_is_named_and_is_an_exit_code(tmp_path: Path) -> None:
    """From an outbox, of which a row is taken once."""
    url = f"sqlite:///{tmp_path}/shop.sqlite"
    init(url)
    entries = list(Generator(seed=6, orders=15, days=2).entries())
    count = write_outbox(url, entries, published=True)
    source = ("--from", "outbox", "--url", url, "--table", "outbox_events", "--once")
    for taken in (count, 0):
        run = conquiet("run", *source, "--tables", "events", "--json", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert lines(run) == [{"batch": 0, "events": taken}]
    assert not {path.name for path in (tmp_path / "lake").iterdir()} & set(STORED)

    agreed = conquiet("reconcile", "--outbox-url", url, "--json", cwd=tmp_path)
    assert (agreed.returncode, agreed.stdout) == (0, ""), agreed.stderr
    assert "everything agrees" in agreed.stderr
    made = {path.name for path in (tmp_path / "lake").iterdir()} & set(STORED)
    assert made == {"recon_completeness", "recon_money", "outbox_delivery"}  # and no more

    lost = forget_an_event(tmp_path / "lake" / "silver")
    late = emit_an_order(url)
    broken = conquiet("reconcile", "--outbox-url", url, "--json", cwd=tmp_path)
    assert broken.returncode == 1
    rows = [row for row in lines(broken) if row["table"] == "recon_completeness"]
    assert all(row["complete"] is False for row in rows)
    assert [event for row in rows for event in row["missing_ids"]] == [late]
    assert [event for row in rows for event in row["lost_ids"]] == [lost]
    nowhere = conquiet("reconcile", "--outbox-url", f"sqlite:///{tmp_path}/no.sqlite", cwd=tmp_path)
    [said] = [line for line in nowhere.stderr.splitlines() if "conquiet: error:" in line]
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert "has no table outbox_events" in said
    assert "Traceback" not in said


def forget_an_event(silver: Path) -> str:
    """Take a row out of a file of silver, as nobody should."""
    import pyarrow.parquet as pq

    file = min(silver.glob("kind=event/*/*.parquet"))
    rows = pq.ParquetFile(file).read()
    pq.write_table(rows.slice(1), file)
    return rows["event_id"][0].as_py()


def emit_an_order(url: str) -> str:
    """An event that no relay has published, and no run has read."""
    import msgspec

    data = msgspec.convert(order(), OrderCreated)
    event = CATALOG.event(data, aggregate_id=data.order_id)
    shop = engine(url)
    with shop.begin() as connection:
        emit(connection, event)
    shop.dispose()
    return str(event.id)


def test_a_stream_ends_well_when_it_is_told_to(tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    entries = list(Generator(seed=9, orders=15, days=2).entries(oracle))
    write_parquet(entries, tmp_path / "log")
    told = ("run", "--from", "files", "--path", "log", "--tables", "zip_daily", "--json")
    told += ("--refresh-seconds", "20")
    running = subprocess.Popen(
        command(*told), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    first = json.loads(running.stdout.readline())  # a batch is done, and the stream waits for more
    assert (first["batch"], first["events"]) == (0, len(entries))
    made = tmp_path / "lake" / "zip_daily"
    # No batch comes after it, and yet facts and marts follow.
    assert eventually(lambda: any(made.glob("*/*.parquet")), timeout=600)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 0, said
    assert "stopped: " in said

    show = conquiet("show", "zip_daily", "--json", "--limit", "1000", cwd=tmp_path)
    assert sum(row["orders"] for row in lines(show)) == len(oracle.rows("fact_order"))
    missing = conquiet("show", "store_daily", cwd=tmp_path)
    assert missing.returncode == 2
    assert "conquiet pipeline run --tables store_daily --once" in missing.stderr
