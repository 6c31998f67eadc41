"""The report: one page of HTML with charts and their numbers, which fetches nothing.

It has two clocks: throughput and lag are in seconds of the run, revenue and the funnel in the
business days of the generated orders.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil
from typing import Any

from conquiet.redis import Topic
from marketplace import charts
from marketplace.charts import Band, Point, Step
from marketplace.demo.servers import Servers
from marketplace.demo.settings import COMMANDS, RELAYS, WORKERS
from marketplace.demo.story import Business, Kill, Story
from marketplace.demo.verdict import Books, Lake, Log
from marketplace.page import page, section, sentence

_SECONDS = "seconds since the first command"
_LEFT_OUT = "Left out by --no-spark: the pipeline refuses bad events and keeps them in quarantine."
_RED = (
    "A line marked WRONG means that the number found differs from the one the generator knows: an"
    " event was lost or took effect twice, or a table has a wrong cell."
)


def render(story: Story) -> str:
    """Return the page of a run that has its verdict."""
    return page(
        "conquiet demo",
        _head(story),
        section("The flow of events", _wide(_flow(story))),
        _verdict(story),
        section("This run, by the clock", *_run(story)),
        section("The marketplace, in its own thirty days", *_business(story), _quarantine(story)),
    )


def _head(story: Story) -> str:
    settings = story.settings
    spark = "Spark" if settings.spark else "without Spark"
    text = (
        f"{settings.orders:,} orders (seed {settings.seed}) through {WORKERS} workers, of which one"
        f" was killed, {RELAYS} relays, PostgreSQL, Redis Streams and {spark},"
        f" in {story.seconds:.0f} seconds."
    )
    if story.verdict.is_right:
        said = "Everything is as the generator expects: nothing lost, nothing done twice."
        return sentence(said, "verdict good") + sentence(text)
    wrong = sum(not line.is_right for line in story.verdict.lines)
    said = f"{wrong} lines of the verdict are WRONG: see below."
    return sentence(said, "verdict bad") + sentence(text)


def _verdict(story: Story) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(line.name)}</th><td>{line.text(line.expected)}</td>'
        f"<td>{line.text(line.found)}</td>"
        + ('<td class="good">ok</td>' if line.is_right else '<td class="bad">WRONG</td>')
        + "</tr>"
        for line in story.verdict.lines
    )
    items = "".join(f"<li>{escape(text)}</li>" for text in story.verdict.differences)
    differences = f"<p>Differences:</p><ul>{items}</ul>" if items else ""
    return (
        '<section><h2>The verdict</h2><div class="card"><p class="muted">Expected is what the'
        " generator knows of its own world; found was counted afterwards, by plain SQL, XRANGE and"
        f' from the files of the lake. {_RED}</p><div class="scrolls all" tabindex="0"><table'
        ' aria-label="The verdict"><thead><tr><th scope="col"></th><th scope="col">expected</th>'
        '<th scope="col">found</th><th scope="col"></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{differences}</div></section>"
    )


def _flow(story: Story) -> str:
    books, log = story.books, story.log
    dropped = log.commands - len(books.effects)
    bad = len(log.first_seen.keys() - books.ids)
    steps = [
        Step("commands", log.commands, joined=(f"{story.duplicates:,} sent twice",)),
        Step("effects", len(books.effects), left=(f"{dropped:,} duplicates",)),
        Step("events in outbox", books.events.total()),
        Step(
            "entries in the log",
            log.entries + log.touches,
            joined=(f"{log.touches:,} of ads", f"{log.repeated:,} twice, {bad:,} bad"),
        ),
    ]
    silver = story.silver
    if silver is not None:
        left = (f"{silver.dropped:,} duplicates", f"{silver.reasons.total():,} in quarantine")
        aside = (f"and {silver.touches:,}", "views and clicks of ads")
        steps.append(Step("events in silver", len(silver.events), joined=aside, left=left))
        steps.append(Step("orders in gold", len(story.world.rows("fact_order"))))
    note = (
        "Above: what joined. Below: what was dropped. Views and clicks of ads go into the log"
        " without an outbox, and into tables of their own."
    )
    return charts.flow("Event flow", steps, note=note)


def _run(story: Story) -> list[str]:
    books, log, line = story.books, story.log, Timeline.of(story)
    shares = ", ".join(f"{name} {value:,.0f} ms" for name, value in lags(books, log).items())
    kill = story.kill
    outage = ""
    if kill is not None:
        outage = (
            f"Process {kill.pid} of worker {kill.worker} was killed by SIGKILL. Process"
            f" {kill.replaced_by} took over {kill.outage_seconds:.1f} s later, first the commands"
            " that were read and not acked."
        )
    stages: list[Point] = [
        (stage.name, round(stage.ended - stage.began, 2)) for stage in story.stages
    ]
    return [
        charts.lines(
            "Commands handled per second",
            line.handled(story),
            bands=line.bands,
            x=_SECONDS,
            note=outage,
        ),
        charts.lines(
            "Events published per second",
            line.published(books, log),
            bands=line.bands,
            x=_SECONDS,
            note="First publications, by the ids of their entries; a rolling rate of 2 s.",
        ),
        charts.lines(
            "Publish lag, in milliseconds",
            line.lags(books, log),
            bands=line.bands,
            x=_SECONDS,
            note=f"From the start of a transaction to the log. All events: {shares}.",
        ),
        charts.bars(
            "Stage durations, in seconds",
            stages,
            unit="s",
            note="Spark starts while the workers run; the audit runs while Spark works.",
        ),
    ]


def _business(story: Story) -> list[str]:
    business = story.business
    note = f"{business.source[0].upper()}{business.source[1:]}."
    return [
        charts.columns(
            "Revenue by day, in dollars",
            business.revenue,
            x="business day in Chicago",
            note=f"{note} In all ${sum(value for _, value in business.revenue):,.2f}.",
        ),
        charts.bars("Top products, revenue in dollars", business.products, note=note),
        charts.bars("Order funnel", business.funnel, unit="orders", note=note),
    ]


def _quarantine(story: Story) -> str:
    if story.silver is None:
        return charts.figure("Quarantine by reason", "", note=_LEFT_OUT, size=(charts.WIDTH, 1))
    reasons: list[Point] = [(name, count) for name, count in story.silver.reasons.most_common()]
    note = "Bad events were written into the log past the outbox, as a broken producer would."
    return charts.bars("Quarantine by reason", reasons, unit="events", note=note)


def _wide(figure: str) -> str:
    return figure.replace("<figure>", '<figure class="wide" tabindex="0">', 1)


# --- the clock of the run -----------------------------------------------------------------------

_MAX_STEPS = 80
_WINDOW_SECONDS = 2.0


@dataclass(frozen=True)
class Timeline:
    """Divides the seconds from the first command to the last publication into equal steps."""

    began: float
    ended: float
    step: float
    kill: Kill | None

    @classmethod
    def of(cls, story: Story) -> Timeline:
        span = max(story.last_published - story.first_sent, 0.5)
        step = ceil(span / _MAX_STEPS * 2) / 2
        return cls(story.first_sent, story.first_sent + span, step, story.kill)

    @property
    def count(self) -> int:
        return ceil((self.ended - self.began) / self.step) + 1

    @property
    def bands(self) -> list[Band]:
        if self.kill is None:
            return []
        kill = self.kill
        text = f"worker {kill.worker} killed, replaced after {kill.outage_seconds:.1f} s"
        return [Band(self.place(kill.at), self.place(kill.replaced_at), text)]

    def place(self, moment: float) -> float:
        return min((moment - self.began) / self.step, self.count - 1)

    def name(self, place: int) -> str:
        return f"{place * self.step:g} s"

    def handled(self, story: Story) -> dict[str, list[Point]]:
        """Give the rate of commands that took effect, by the worker of their partition."""
        topic = Topic(COMMANDS, WORKERS)
        workers: list[Counter[float]] = [Counter() for _ in range(WORKERS)]
        effects = story.books.effects
        for message in story.world.commands:
            if message.id in effects:
                workers[topic.partition(message.key or message.id)][effects[message.id]] += 1
        return {
            f"worker {slot + 1}": self._spread(transactions, slot + 1)
            for slot, transactions in enumerate(workers)
        }

    def _spread(self, transactions: Counter[float], worker: int) -> list[Point]:
        """Spread the commands of a transaction over the time until the worker's next one begins.

        A killed worker works until it is killed. Counted at the beginning of their transactions,
        hundreds at once, commands would give a sawtooth.
        """
        rates = [0.0] * self.count
        for began, ended in pairwise([*sorted(transactions), self.ended]):
            if self.kill and self.kill.worker == worker and began < self.kill.at < ended:
                ended = self.kill.at
            rate = transactions[began] / max(ended - began, 1e-3)
            for place in range(int(self.place(began)), int(self.place(ended)) + 1):
                start = self.began + place * self.step
                overlap = min(ended, start + self.step) - max(began, start)
                rates[place] += rate * max(overlap, 0.0) / self.step
        return [(self.name(place), rate) for place, rate in enumerate(rates)]

    def published(self, books: Books, log: Log) -> list[Point]:
        """Give the rolling rate of events that reached the log for the first time."""
        moments = sorted(ms / 1_000 for event, ms in log.first_seen.items() if event in books.ids)
        points = []
        for place in range(self.count):
            at = self.began + place * self.step
            start, end = max(at - _WINDOW_SECONDS / 2, self.began), at + _WINDOW_SECONDS / 2
            found = bisect_right(moments, end) - bisect_right(moments, start)
            points.append((self.name(place), found / (end - start)))
        return points

    def lags(self, books: Books, log: Log) -> dict[str, list[Point]]:
        """Give the median and the 95th percentile of the events that each step published."""
        steps: dict[int, list[float]] = {}
        for event, ms in log.first_seen.items():
            if event in books.ids:
                lag = max(0.0, ms - log.created[event] * 1_000)
                steps.setdefault(int(self.place(ms / 1_000)), []).append(lag)
        found: dict[str, list[Point]] = {"p50": [], "p95": []}
        ordered = [0.0]
        for place in range(self.count):  # nothing published in a step: the lag before it goes on
            ordered = sorted(steps.get(place, ordered))
            for name, percent in (("p50", 50), ("p95", 95)):
                found[name].append((self.name(place), _percentile(ordered, percent)))
        return found


def lags(books: Books, log: Log) -> dict[str, float]:
    """Give the milliseconds from the start of a transaction to the first entry of its events."""
    found = sorted(
        max(0.0, ms - log.created[event] * 1_000)
        for event, ms in log.first_seen.items()
        if event in books.ids
    )
    shares = (("p50", 50), ("p95", 95), ("p99", 99), ("longest", 100))
    return {name: _percentile(found, percent) for name, percent in shares} if found else {}


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[ceil(len(ordered) * percent / 100) - 1]


# --- the clock of the business ------------------------------------------------------------------

_TOP = 10
_STEPS = {
    "placed": "created_at",
    "accepted, in whole or in part": "decided_at",
    "ready for dispatch": "ready_at",
    "in transit": "in_transit_at",
    "delivered": "delivered_at",
    "paid": "collected_at",
    "closed": "closed_at",
}
_STATES = {
    "placed": ("created_pending",),
    "accepted, in whole or in part": ("accepted", "partially_accepted"),
    "ready for dispatch": ("ready_for_dispatch",),
    "in transit": ("in_transit",),
    "delivered": ("delivered",),
    "paid": ("paid",),
    "closed": ("closed",),
}

_BY_DAY = """
WITH collected AS (
    SELECT order_id, min(recorded_at) AS at FROM market_ledger
    WHERE kind IN ('cash_collected', 'payment_settled') GROUP BY order_id)
SELECT (at AT TIME ZONE 'America/Chicago')::date::text, sum(collected_cents)
FROM market_orders JOIN collected ON order_id = id
WHERE status NOT IN ('canceled', 'expired', 'rejected') GROUP BY 1 ORDER BY 1
"""
_BY_PRODUCT = """
SELECT product_id::text, sum(line_total_cents) FROM market_order_lines l
JOIN market_orders o ON o.id = l.order_id
WHERE collected_cents > 0 AND l.status <> 'rejected'
AND o.status NOT IN ('canceled', 'expired', 'rejected')
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 10
"""
_BY_STATE = """
SELECT payload_json #>> '{data,to_status}', count(*) FROM outbox_events
WHERE event_type = 'order_state_changed' GROUP BY 1
UNION ALL SELECT 'created_pending', count(*) FROM market_orders
UNION ALL SELECT 'paid', count(*) FROM market_orders WHERE collected_cents > 0
"""


def business_by_spark(lake: Lake) -> Business:
    """Sum up the tables that Spark made."""
    days: Counter[str] = Counter()
    for row in lake.rows("store_daily"):
        days[str(row["business_day"])] += row["revenue_cents"]
    products, titles = Counter[str](), dict[str, str]()
    for row in lake.rows("fact_order_line", ["product_id", "title", "revenue_cents"]):
        products[row["product_id"]] += row["revenue_cents"]
        titles[row["product_id"]] = row["title"]
    best = sorted(products.items(), key=lambda item: (-item[1], item[0]))[:_TOP]
    orders = lake.rows("fact_order")
    return Business(
        "from the tables that Spark made",
        [(day, cents / 100) for day, cents in sorted(days.items())],
        [(f"{titles[id_]} ({id_[:8]})", cents / 100) for id_, cents in best],
        [(name, _reached(orders, column)) for name, column in _STEPS.items()],
    )


def _reached(orders: list[dict[str, Any]], column: str) -> int:
    return sum(
        row[column] is not None and not (column == "decided_at" and row["decision"] == "rejected")
        for row in orders
    )


def business_by_sql(servers: Servers) -> Business:
    """Sum up the business tables of PostgreSQL, where there is no lake."""
    with servers.connect() as connection:
        revenue: list[Any] = connection.execute(_BY_DAY).fetchall()
        products: list[Any] = connection.execute(_BY_PRODUCT).fetchall()
        states: dict[str, int] = dict(connection.execute(_BY_STATE).fetchall())
    return Business(
        "from the business tables of PostgreSQL, without Spark",
        [(day, float(cents) / 100) for day, cents in revenue],
        [(f"product {id_[:8]}", float(cents) / 100) for id_, cents in products],
        [(name, sum(states.get(one, 0) for one in names)) for name, names in _STATES.items()],
    )
