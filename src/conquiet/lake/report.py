"""Report: a page of HTML about a lake, in one file that fetches nothing.

It shows events by type and day, the quarantine by reason, broken rules, completeness and lag, and
the charts that a pipeline declares. It reads Delta by DuckDB; no JVM is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from html import escape
from math import floor, log10
from typing import Any

from conquiet.errors import ConfigError
from conquiet.lake.definition import ROWS_QUARANTINE
from conquiet.lake.query import Database, naming, quoted
from conquiet.lake.reconcile import mismatches

_WIDTH, _HEIGHT = 720, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 34
_MOST_BARS = 12
_MOST_DAYS = 366
_ROWS = 500
_Value = date | str
_Points = list[tuple[_Value, float | None]]


@dataclass(frozen=True)
class Chart:
    """A chart of the report: SQL whose first column is a day or a name, the second a number."""

    title: str
    sql: str


_LAG_DAYS = 7
"""Events that come later than this were imported: their age is no lag of a relay."""
_OWN = (
    Chart(
        "Events per day",
        "SELECT created_at::DATE, count(*) FROM events WHERE created_at IS NOT NULL GROUP BY 1",
    ),
    Chart("Events by type", "SELECT event_type, count(*) FROM events GROUP BY 1"),
    Chart("Quarantine by reason", "SELECT reason, count(*) FROM events_quarantine GROUP BY 1"),
    Chart("Broken rules", "SELECT rule, sum(failed)::BIGINT FROM expectations GROUP BY 1"),
    Chart(
        "Broken rules per day",
        "SELECT day, sum(failed)::BIGINT FROM expectations WHERE day IS NOT NULL GROUP BY 1",
    ),
    Chart(
        "Lag from outbox to log, 95th percentile, in seconds",
        "SELECT hour::DATE, max(lag_p95_ms) / 1000 FROM outbox_delivery"
        f" WHERE lag_p50_ms < {_LAG_DAYS} * 86_400_000 GROUP BY 1",
    ),
)


def report(database: Database, title: str, charts: Sequence[Chart] = ()) -> str:
    """Draw the page for what the tables hold now, without charts of tables that do not exist."""
    parts = [_summary(database)]
    for heading, some in (("Tables", charts), ("Events", _OWN)):
        drawn = [figure for one in some if (figure := _draw(database, one)) is not None]
        if drawn:
            parts.append(f"<h2>{heading}</h2><div class=cards>{''.join(drawn)}</div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"</head>\n<body><main><h1>{escape(title)}</h1>\n{''.join(parts)}\n</main></body></html>\n"
    )


def _summary(database: Database) -> str:
    """Write a sentence about completeness, red if events got lost on the way, and the counts."""
    counted = "SELECT sum(len({}))::BIGINT FROM recon_completeness"
    missing, lost, foreign = (
        _number(database, counted.format(f"{name}_ids")) for name in ("missing", "lost", "foreign")
    )
    compared = _number(database, "SELECT count(outbox_count) FROM recon_completeness")
    counts = [
        ("events are in the tables", _number(database, "SELECT count(*) FROM events")),
        ("events are in quarantine", _number(database, "SELECT count(*) FROM events_quarantine")),
    ]
    faults = [
        (missing, "events of the outbox never reached the log: see whether the relay runs"),
        (lost, "events of the log are in no table: replay their days"),
    ]
    wrong = [f"{number:,} {text}" for number, text in faults if number]
    if wrong:
        said = f'<p class="bad">{escape("; ".join(wrong))}. recon_completeness has their ids.</p>'
    elif not any(count for _, count in counts):
        said = "<p>There are no events yet.</p>"
    else:
        ends = "outbox and log" if compared else "the log (no outbox was compared with it)"
        said = f"<p>Every event of {ends} is in the tables or in quarantine.</p>"
    if compared:
        counts.append(("events of the log are in no outbox: written past it", foreign))
    if database.exists(ROWS_QUARANTINE):
        rows = _number(database, f"SELECT count(*) FROM {ROWS_QUARANTINE}")
        counts.append(("rows of facts are in quarantine", rows))
    for name in mismatches(database.names):
        rows = _number(database, f"SELECT count(*) FROM {quoted(name)}")
        counts.append((f"rows of {name}: events contradict each other", rows))
    cells = [f"<div class=card><b>{count:,}</b> {escape(text)}</div>" for text, count in counts]
    return f"{said}<div class=facts>{''.join(cells)}</div>"


def _number(database: Database, sql: str) -> int:
    rows = _rows(database, sql)
    return int(rows[0][0] or 0) if rows else 0


def _rows(database: Database, sql: str) -> list[tuple[Any, ...]] | None:
    """Run a query; None if a table of it does not exist in this lake."""
    import duckdb

    database.offer(sql)
    try:
        found: list[tuple[Any, ...]] = database.run(sql).fetchall()
    except duckdb.CatalogException:
        return None
    return found


def _draw(database: Database, chart: Chart) -> str | None:
    with naming(f"the chart {chart.title!r}"):
        rows = _rows(database, chart.sql)
    if not rows:
        return None
    try:
        points: _Points = [
            (_name(row[0]), None if row[1] is None else float(row[1])) for row in rows if row[0]
        ]
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the chart {chart.title!r}: its SQL gives a day or a name, then a number; not"
            f" {rows[0]!r:.200}"
        ) from error
    drawn, size = _columns(points) if points and _is_day(points[0][0]) else _bars(points)
    label = escape(chart.title)
    numbers = "".join(
        f"<tr><th>{escape(str(name))}<td>{'' if value is None else _text(value)}"
        for name, value in sorted(points, key=lambda one: str(one[0]))[:_ROWS]
    )
    return (
        f'<figure><figcaption>{label}</figcaption><svg viewBox="0 0 {size[0]} {size[1]}" role="img"'
        f' aria-label="{label}">{drawn}</svg><details><summary>The numbers</summary>'
        f"<div class=scrolls><table>{numbers}</table></div></details></figure>"
    )


def _name(value: Any) -> _Value:
    if isinstance(value, datetime):
        return value.date()
    return value if isinstance(value, date) else str(value)


def _is_day(value: _Value) -> bool:
    return isinstance(value, date)


# --- drawing ------------------------------------------------------------------------------------


def _columns(points: _Points) -> tuple[str, tuple[int, int]]:
    """Draw a column per day; a day without data leaves a gap."""
    known = {day: value for day, value in points if isinstance(day, date)}
    last = max(known)
    first = max(min(known), last - timedelta(days=_MOST_DAYS - 1))
    days = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    top = _round_up(known[day] for day in days if known.get(day) is not None)
    drawn = _grid(top)
    step = (_WIDTH - _LEFT - _RIGHT) / len(days)
    every = max(1, -(-len(days) // 8))
    for place, day in enumerate(days):
        x = _LEFT + place * step
        if place % every == 0:
            drawn += _label(x + step / 2, _HEIGHT - 12, day.strftime("%b %-d"), "middle")
        value = known.get(day)
        if value is None:
            continue
        y = _y(value, top)
        drawn += (
            f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{max(step * 0.8, 0.5):.1f}"'
            f' height="{_HEIGHT - _BOTTOM - y:.1f}"><title>{day}: {_text(value)}</title></rect>'
        )
    return drawn, (_WIDTH, _HEIGHT)


def _bars(points: _Points) -> tuple[str, tuple[int, int]]:
    """Draw the largest values as bars beside their names."""
    largest = sorted(points, key=lambda one: (-(one[1] or 0), str(one[0])))[:_MOST_BARS]
    top = max((value or 0 for _, value in largest), default=0) or 1
    drawn, row, left = "", 28, 240
    for place, (name, found) in enumerate(largest):
        value, y = found or 0.0, place * row + 4
        width = max(value, 0) / top * (_WIDTH - left - 110)
        text = str(name) if len(str(name)) <= 30 else f"{str(name)[:29]}…"
        drawn += _label(left - 8, y + 15, text, "end") + (
            f'<rect x="{left}" y="{y}" height="{row - 8}" width="{width:.1f}">'
            f"<title>{escape(str(name))}: {_text(value)}</title></rect>"
        )
        drawn += _label(left + width + 6, y + 15, _text(value), "start")
    return drawn, (_WIDTH, len(largest) * row + 8)


def _grid(top: float) -> str:
    drawn = ""
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(top * part, top)
        drawn += f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        drawn += _label(_LEFT - 8, y + 4, _tick(top * part), "end")
    return drawn


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - min(max(value, 0.0) / top, 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def _round_up(values: Iterable[float | None]) -> float:
    """Return the end of a scale: a round number that no value exceeds.

    >>> _round_up([130.0, 17.0]), _round_up([])
    (200.0, 1.0)
    """
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(most))
    return next(unit * step for step in (1, 2, 2.5, 5, 10) if unit * step >= most)


def _tick(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.2f}"


_STYLE = """\
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1c2024; --muted: #5c6570;
  --rule: #dfe3e8; --bar: #1f6feb; --bad: #b42318 }
@media (prefers-color-scheme: dark) { :root { --paper: #101418; --card: #181d23; --ink: #e6e9ec;
  --muted: #9aa5b1; --rule: #2d353e; --bar: #6cb0ff; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 0 auto; padding: 1.5rem;
  background: var(--paper); color: var(--ink) }
h1 { font-size: 1.7rem } h2 { font-size: 1.15rem; margin: 2rem 0 .8rem }
.cards, .facts { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)) }
.facts { grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)) }
figure, .card { margin: 0; padding: 1rem; background: var(--card); min-width: 0;
  border: 1px solid var(--rule); border-radius: 10px }
.card b { font-size: 1.4rem } .bad { color: var(--bad); font-weight: 650 }
figcaption { font-weight: 650; margin-bottom: .4rem }
svg { width: 100%; height: auto; font-size: 14px; display: block }
svg text { fill: var(--muted) } svg line { stroke: var(--rule) }
svg rect { fill: var(--bar) } svg rect:hover { fill: var(--ink) }
details { margin-top: .6rem } summary { cursor: pointer; color: var(--muted) }
.scrolls { overflow: auto; max-height: 20rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--rule) }
th { text-align: left; font-weight: 500 }"""
