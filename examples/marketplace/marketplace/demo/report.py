"""Report: one page of HTML that tells what happened, and opens without a network."""

from __future__ import annotations

from html import escape

from marketplace import charts
from marketplace.charts import Point, Step
from marketplace.demo.settings import RELAYS, WORKERS
from marketplace.demo.story import Story
from marketplace.demo.timeline import handled, lag_by_step, lags, published
from marketplace.page import page, section, sentence

_SECONDS = "seconds since the first command"
_LEFT_OUT = "Left out by --no-spark: the pipeline finds bad events and sets them aside."


def report(story: Story) -> str:
    """The page, once everything else is done."""
    return page(
        "conquiet demo",
        _head(story),
        section("The way of the events", _wide(_flow(story))),
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
        said = "Everything is as the generator foresaw it: nothing lost, nothing done twice."
        return sentence(said, "verdict good") + sentence(text)
    said = "Something is not as the generator foresaw it: see the lines marked WRONG."
    return sentence(said, "verdict bad") + sentence(text)


def _verdict(story: Story) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(line.name)}</th><td>{line.text(line.expected)}</td>'
        f"<td>{line.text(line.found)}</td>"
        + ('<td class="good">ok</td>' if line.is_right else '<td class="bad">WRONG</td>')
        + "</tr>"
        for line in story.verdict.lines
    )
    told = "".join(f"<li>{escape(text)}</li>" for text in story.verdict.differences)
    differences = f"<p>What differs:</p><ul>{told}</ul>" if told else ""
    return (
        '<section><h2>The verdict</h2><div class="card"><p class="muted">Expected is what the'
        " generator knows of its own world; found was counted afterwards, by plain SQL, XRANGE and"
        ' from Parquet files.</p><div class="scrolls all" tabindex="0"><table aria-label="The'
        ' verdict"><thead><tr><th scope="col"></th><th scope="col">expected</th>'
        '<th scope="col">found</th><th scope="col"></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{differences}</div></section>"
    )


def _flow(story: Story) -> str:
    world, books, log = story.world, story.books, story.log
    dropped = log.commands - len(books.effects)
    bad = len(log.first_seen.keys() - books.ids)
    steps = [
        Step("commands", log.commands, joined=(f"{story.commands_repeated:,} of them twice",)),
        Step("effects", len(books.effects), left=(f"{dropped:,} duplicates dropped",)),
        Step("events in the outbox", books.events.total()),
        Step(
            "entries of the log",
            log.entries + log.touches,
            joined=(
                f"{log.touches:,} of ads",
                f"{log.repeated:,} repeated, {bad:,} bad",
            ),
        ),
    ]
    silver = story.silver
    if silver is not None:
        left = (f"{silver.dropped:,} duplicates", f"{silver.reasons.total():,} in quarantine")
        steps.append(Step("events in silver", len(silver.events) + silver.touches, left=left))
        steps.append(Step("orders in gold", len(world.rows("fact_order"))))
    return charts.flow("Event flow", steps, note="What joined on the way, and what was dropped.")


def _run(story: Story) -> list[str]:
    world, books, log, line = story.world, story.books, story.log, story.line
    found = lags(books, log)
    told = ", ".join(f"{name} {value:,.0f} ms" for name, value in found.items())
    kill = story.kill
    taken = ""
    if kill is not None:
        taken = (
            f"Process {kill.pid} was killed; process {kill.replaced_by} took over"
            f" {kill.replaced_at - kill.at:.1f} s later, with what was read and not acked."
        )
    stages: list[Point] = [
        (stage.name, round(stage.ended - stage.began, 2)) for stage in story.stages
    ]
    return [
        charts.lines(
            "Commands handled per second",
            handled(line, world, books),
            marks=line.marks,
            x=_SECONDS,
            note=taken,
        ),
        charts.lines(
            "Events published per second",
            published(line, books, log),
            marks=line.marks,
            x=_SECONDS,
            note="First publications, by the ids of their entries in the log.",
        ),
        charts.lines(
            "Publish lag, in milliseconds",
            lag_by_step(line, books, log),
            marks=line.marks,
            x=_SECONDS,
            note=f"From the beginning of a transaction to the log. All events: {told}.",
        ),
        charts.bars(
            "Stage durations, in seconds",
            stages,
            unit="s",
            note="Java starts beside the servers, the audit runs beside Spark.",
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
