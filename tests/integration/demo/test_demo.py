"""`conquiet demo`: what it shows is true, it can tell when it is not, and it leaves nothing."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from tests.integration.demo.running import Demo, lines_of
from tests.needs import found
from tests.waiting import eventually

from conquiet import embedded
from conquiet.errors import ConfigError
from marketplace.demo.run import run_demo
from marketplace.demo.servers import Servers, servers
from marketplace.demo.settings import Settings
from marketplace.generator import DOMAIN_TOPIC

FIGURES = [
    "Event flow",
    "Commands handled per second",
    "Events published per second",
    "Publish lag, in milliseconds",
    "Stage durations, in seconds",
    "Revenue by day, in dollars",
    "Top products, revenue in dollars",
    "Order funnel",
    "Quarantine by reason",
]


@pytest.fixture(autouse=True, scope="module")
def servers_are_there() -> None:
    found("PostgreSQL", lambda: embedded.postgres(private=True))
    found("Redis", lambda: embedded.redis(private=True))


class Silent:
    """Shows no progress."""

    def begin(self, text: str, label: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


def check_page(page: str) -> None:
    """All figures are there, with their tables, and nothing is fetched from anywhere."""
    assert [title for title in FIGURES if f"<figcaption>{title}</figcaption>" not in page] == []
    assert page.count('role="img"') >= len(FIGURES)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)|url\(|@import|<script""", page)
    assert "prefers-color-scheme: dark" in page


# --- a small one ------------------------------------------------------------------------------


def test_a_small_one_without_spark(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--orders", "30", "--no-spark", "--json")
    code, output, errors = demo.finish()
    assert code == 0, output + errors
    verdict = json.loads(output)
    assert verdict["ok"]
    assert verdict["kill"]["pid"] != verdict["kill"]["replaced_by"]
    lines = lines_of(verdict)
    assert lines["events lost"] == (0, 0)
    assert lines["commands that took effect"][1] > 200
    assert "Spark" not in str(lines)
    assert "without Spark" in errors
    assert "killed by SIGKILL" in errors
    check_page((demo.folder / "report.html").read_text())
    assert json.loads((demo.folder / "verdict.json").read_text())["ok"]
    assert demo.left() == []


def test_without_java_one_line_says_what_to_do(tmp_path: Path) -> None:
    demo = Demo(tmp_path, PATH="/nowhere", JAVA_HOME="")
    code, output, errors = demo.finish()
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert "--no-spark" in errors
    assert not demo.folder.exists()


def test_a_redis_with_such_keys_is_left_alone(redis_url: str, redis_client: Any) -> None:
    redis_client.xadd(DOMAIN_TOPIC, {"mine": "1"})
    with pytest.raises(ConfigError, match="pf-domain-events"), servers(Settings(broker=redis_url)):
        pass
    assert redis_client.xlen(DOMAIN_TOPIC) == 1


def test_a_server_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--broker"),
        servers(Settings(broker="redis://127.0.0.1:1")),
    ):
        pass
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    with pytest.raises(ConfigError, match="--database"), servers(Settings(database=nowhere)):
        pass


# --- long ones --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_of_it(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--orders", "100")
    code, output, errors = demo.finish()
    assert code == 0, output + errors
    verdict = json.loads((demo.folder / "verdict.json").read_text())
    lines = lines_of(verdict)
    assert lines["events in quarantine"][1] > 0
    assert lines["duplicates dropped by Spark"][1] > 0
    revenue = lines["revenue, generator = Spark"]
    assert revenue[0] == revenue[1] > 0
    assert "nothing lost, nothing done twice" in output
    check_page((demo.folder / "report.html").read_text())
    assert demo.left() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_verdict_sees_a_cent_too_much(tmp_path: Path) -> None:
    def add_a_cent(servers: Servers) -> None:
        with servers.connect() as connection:
            connection.execute(
                "UPDATE market_orders SET collected_cents = collected_cents + 1 WHERE id ="
                " (SELECT id FROM market_orders WHERE status = 'closed' LIMIT 1)"
            )

    settings = Settings(orders=30, folder=tmp_path / "results", spark=False)
    verdict = run_demo(settings, Silent(), before_audit=add_a_cent).verdict
    assert not verdict.is_right
    assert [line.name for line in verdict.lines if not line.is_right] == [
        "orders unlike the generator's",
        "revenue, generator = books",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_verdict_sees_what_spark_was_not_given(tmp_path: Path) -> None:
    def lose_a_payment(servers: Servers) -> None:
        client = servers.client
        with servers.connect() as connection:  # of the outbox: a bad event has a payout, too
            [lost] = connection.execute(
                "SELECT id::text FROM outbox_events"
                " WHERE event_type::text = 'vendor_payout_recorded' LIMIT 1"
            ).fetchone() or [""]
        entries = client.xrange(DOMAIN_TOPIC)
        client.xdel(DOMAIN_TOPIC, *(entry for entry, f in entries if f[b"id"] == lost.encode()))

    settings = Settings(orders=30, folder=tmp_path / "results")
    verdict = run_demo(settings, Silent(), before_audit=lose_a_payment).verdict
    wrong = {line.name for line in verdict.lines if not line.is_right}
    assert wrong >= {"events published", "events lost", "events in silver"}
    assert any(name.startswith("rows unlike the generator's") for name in wrong)
    assert "WRONG" in (tmp_path / "results" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["servers start", "workers handle", "is killed", "Spark makes"])
def test_a_signal_ends_it_at_any_moment(tmp_path: Path, moment: str, number: int) -> None:
    options = () if moment == "Spark makes" else ("--no-spark",)
    demo = Demo(tmp_path, "--orders", "60", *options)
    demo.read_until(moment)
    demo.process.send_signal(number)
    code, output, _ = demo.finish()
    assert (code, output) == (130, "")
    # Daemons of PySpark end when they find that Java has gone.
    assert eventually(lambda: demo.left() == [], timeout=30), demo.left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--orders", "60")
    demo.read_until("is killed")
    demo.process.kill()
    demo.finish()
    assert eventually(lambda: demo.left() == [], timeout=60), demo.left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kept_servers_can_be_looked_at_until_a_signal(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--orders", "30", "--no-spark", "--keep")
    said = demo.read_until("redis-cli")
    [broker] = re.findall(r"redis-cli -u (\S+)", said)
    [database] = re.findall(r"psql '(\S+)'", said)
    with psycopg.connect(database) as connection:
        [count] = connection.execute("SELECT count(*) FROM market_orders").fetchone() or [0]
    assert count == 30
    assert redis.Redis.from_url(broker).exists(DOMAIN_TOPIC)
    demo.process.send_signal(signal.SIGINT)
    code, output, _ = demo.finish()
    assert (code, "nothing lost" in output) == (0, True)
    assert demo.left() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spark", [True, False])
def test_on_servers_of_ones_own(
    tmp_path: Path, database_url: str, private_redis: embedded.RedisServer, spark: bool
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE market_orders (mine text)")
    client: Any = redis.Redis.from_url(private_redis.url)
    client.set("mine", "1")
    options = [] if spark else ["--no-spark"]
    addresses = ["--database", database_url, "--broker", private_redis.url]
    demo = Demo(tmp_path, "--orders", "30", *options, *addresses)
    code, output, errors = demo.finish()
    assert code == 0, output + errors
    assert client.keys("*") == [b"mine"]
    with psycopg.connect(database_url) as connection:
        names = "SELECT table_schema, table_name FROM information_schema.tables WHERE"
        rest = connection.execute(
            f"{names} table_schema NOT IN ('pg_catalog', 'information_schema')"
        )
        assert rest.fetchall() == [("public", "market_orders")]
    assert demo.left() == []


FITS = """() => [document.documentElement, ...document.querySelectorAll(".scrolls.all")]
    .every(element => element.scrollWidth <= element.clientWidth)"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_opens_in_a_browser(tmp_path: Path, chromium: Any) -> None:
    demo = Demo(tmp_path, "--orders", "30", "--no-spark")
    assert demo.finish()[0] == 0
    heard: list[str] = []
    for scheme in ("light", "dark"):
        page = chromium.new_page(color_scheme=scheme)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url))
        page.goto(f"file://{demo.folder / 'report.html'}")
        assert page.locator("figure svg").count() >= len(FIGURES)
        page.locator("details").first.locator("summary").click()
        assert page.locator("details table").first.is_visible()
        page.set_viewport_size({"width": 390, "height": 800})  # a phone: the verdict is in view
        assert page.locator(".scrolls.all").count() == 1
        assert page.evaluate(FITS)
        page.close()
    assert [text for text in heard if not text.startswith(("file://", "data:"))] == []
