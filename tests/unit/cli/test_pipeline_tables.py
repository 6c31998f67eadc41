"""`conquiet pipeline show, report, reconcile, replay, quarantine, optimize, import`: no JVM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conquiet.cli import main
from conquiet.events import emit
from conquiet.sql import engine
from marketplace.catalog import CATALOG, MediaUploaded
from marketplace.generator import Generator, write_outbox, write_parquet
from marketplace.oracle import Oracle
from marketplace.service import init

TARGET = "marketplace.lake:pipeline"
ORDERS = "SELECT sum(revenue_cents)::BIGINT AS cents, count(*) AS orders FROM fact_order"


@pytest.fixture(autouse=True)
def own_lake():
    """The pipeline is a module's: what a command points it at must not stay."""
    from marketplace.lake import pipeline

    before = pipeline.lake
    yield
    pipeline.lake = before


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory):
    """A lake that was filled by `import`, what it must hold, and its outbox."""
    root = tmp_path_factory.mktemp("tables")
    oracle = Oracle(outbox=False)
    entries = list(Generator(seed=5, orders=40, days=3, faults="all").entries(oracle))
    write_parquet(entries, root / "log")
    assert main(["pipeline", "import", TARGET, str(root / "log"), "--to", str(root / "lake")]) == 0
    return root, oracle, entries


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main(["pipeline", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_files_are_taken_in_once(filled, capsys: pytest.CaptureFixture[str]) -> None:
    root, oracle, entries = filled
    to = ("--to", str(root / "lake"))
    assert answers(capsys, "import", TARGET, str(root / "log"), *to) == [{"entries": 0}]
    tables = {row["table"]: row["rows"] for row in answers(capsys, "show", *to)}
    assert tables["raw_events"] == len(entries)
    assert tables["fact_order"] == oracle.count("fact_order")


def test_show_answers_sql_without_the_definitions(
    filled, capsys: pytest.CaptureFixture[str]
) -> None:
    root, oracle, _ = filled
    orders = oracle.rows("fact_order")
    cents = sum(row["revenue_cents"] for row in orders)
    found = answers(capsys, "show", "--sql", ORDERS, "--to", str(root / "lake"))
    assert found == [{"cents": cents, "orders": len(orders)}]
    [row] = answers(capsys, "show", "store_daily", "--limit", "1", "--to", str(root / "lake"))
    assert row["business_day"] == "2026-03-01"
    assert not any(name.startswith("_") for name in row)
    events = answers(capsys, "show", "--to", str(root / "lake"), "--sql",
                     "SELECT sum(delivery_count)::BIGINT AS n FROM events")  # fmt: skip
    assert events == [{"n": sum(row["delivery_count"] for row in oracle.rows("events"))}]


def test_show_imports_neither_spark_nor_pandas(filled) -> None:
    """Each would take longer than all the rest of a command."""
    command = [sys.executable, "-X", "importtime", "-m", "conquiet", "pipeline", "show"]
    done = subprocess.run(
        [*command, TARGET, "store_daily", "--to", str(filled[0] / "lake")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "business_day" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "duckdb" in imported
    assert not imported & {"pandas", "pyspark", "sqlalchemy"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "shop_daily"], "no table 'shop_daily'"),
        (["show", "--sql", "SELECT bogus FROM fact_order"], "--sql: Binder Error: Referenced col"),
        (["show", "--sql", "SELEC 1"], "--sql: Parser Error"),
        (["show", "a:b", "c:d"], "name one pipeline and one table"),
        (["replay", TARGET, "--since", "2026-03-02", "--until", "2026-03-01"], "is not before"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_line(
    filled, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *arguments, "--to", str(filled[0] / "lake")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["show", "report", "reconcile", "replay", "quarantine list", "optimize"]
)
def test_a_lake_that_is_not_there_is_not_made(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "misspelt"
    assert main(["pipeline", *verb.split(), TARGET, "--to", str(lake)]) == 2
    assert f"there is no lake at {lake}" in capsys.readouterr().err
    assert not lake.exists()


def test_tables_are_shown_before_the_first_refresh_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from marketplace.lake import pipeline

    pipeline.lake = str(tmp_path)
    pipeline.take([])
    tables = {row["table"]: row["rows"] for row in answers(capsys, "show", TARGET)}
    assert tables["store_daily"] == tables["outbox_delivery"] == 0
    assert main(["pipeline", "show", TARGET, "store_daily"]) == 2
    said = "the table store_daily is not made yet: the first refresh makes it"
    assert said in capsys.readouterr().err


def test_rows_and_days_are_checked_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pipeline", "show", "store_daily", "--limit", "0"])
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["pipeline", "replay", TARGET, "--since", "soon", "--until", "2026-03-01"])
    assert "'soon' is not a day such as 2026-01-31" in capsys.readouterr().err


def test_a_report_has_charts_and_needs_no_network(
    filled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    to = ("--to", str(filled[0] / "lake"))
    answers(capsys, "report", TARGET, "--output", str(page), *to)
    text = page.read_text()
    assert text.count("<svg") >= 9
    assert "Quarantine by reason" in text
    assert "Revenue per day, in dollars" in text
    assert not re.search(r"""(src|href)=["']?http""", text)
    # Contradictions between events are counted, and are no events that got lost.
    assert re.search(r"<b>[1-9]\d*</b> rows of recon_money", text)
    assert "Every event of the log (no outbox was compared with it) is in the tables" in text
    assert 'class="bad"' not in text


def test_replay_and_retry_leave_right_tables_alone(
    filled, capsys: pytest.CaptureFixture[str]
) -> None:
    root, oracle, _ = filled
    to = ("--to", str(root / "lake"))
    before = answers(capsys, "show", "--sql", ORDERS, *to)
    since = ("--since", "2026-03-01", "--until", "2026-03-03")
    assert answers(capsys, "replay", TARGET, *since, *to) == [{"days": 2}]
    [everything] = answers(capsys, "replay", TARGET, *to)
    assert everything["days"] > 2
    assert answers(capsys, "quarantine", "retry", TARGET, *to) == [{"events": 0}]
    refused = answers(capsys, "quarantine", "list", TARGET, "--limit", "1000", *to)
    assert len(refused) == oracle.count("events_quarantine")
    answers(capsys, "optimize", TARGET, *to)
    assert answers(capsys, "show", "--sql", ORDERS, *to) == before


def test_rows_that_do_not_agree_are_named_and_are_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/shop.sqlite"
    init(url)
    entries = list(Generator(seed=6, orders=15, days=2).entries())
    write_outbox(url, entries, published=True)
    write_parquet(entries, tmp_path / "log")
    to = ("--to", str(tmp_path / "lake"))
    answers(capsys, "import", TARGET, str(tmp_path / "log"), *to)
    assert answers(capsys, "reconcile", TARGET, "--database", url, *to) == []

    late = emit_an_event(url)
    assert main(["pipeline", "reconcile", TARGET, "--database", url, "--json", *to]) == 1
    [row] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["table"], row["complete"], row["missing_ids"]) == (
        "recon_completeness",
        False,
        [late],
    )
    page = tmp_path / "page.html"
    answers(capsys, "report", TARGET, "--output", str(page), *to)
    [red] = re.findall('class="bad">([^<]*)', page.read_text())
    assert red.startswith("1 events of the outbox never reached the log")
    nowhere = f"sqlite:///{tmp_path}/no.sqlite"
    assert main(["pipeline", "reconcile", TARGET, "--database", nowhere, *to]) == 1
    assert "outbox_events" in capsys.readouterr().err


def emit_an_event(url: str) -> str:
    """Store an event that no relay has published, and no run has read."""
    from datetime import UTC, datetime
    from uuid import uuid4

    data = MediaUploaded(uuid4(), uuid4(), "photo", "image/png", 5, datetime.now(UTC))
    event = CATALOG.event(data, aggregate_id=data.media_id)
    shop = engine(url)
    with shop.begin() as connection:
        emit(connection, event)
    shop.dispose()
    return str(event.id)
