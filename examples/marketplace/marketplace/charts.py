"""Charts as inline SVG, each with its numbers as a table. They need no script and no network.

Colours are classes that `marketplace.page` defines, for light and for dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 22, 46, 50
ROW = 31
_NAMES = 250
"""The width of the names beside bars."""
_MOST_LABELS = 8
_MAX_DOTS = 60
"""Lines of more points have dots that are thinner than the line."""

Point = tuple[str, float]
"""A name and a value."""


class Band(NamedTuple):
    """Marks a span between two places of the horizontal axis, with a label above it."""

    start: float
    end: float
    text: str


class Step(NamedTuple):
    """Describes a box of a flow: its count, and what joined or left on the way to it."""

    name: str
    value: float
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def lines(
    title: str,
    points: Sequence[Point] | Mapping[str, Sequence[Point]],
    *,
    bands: Sequence[Band] = (),
    x: str = "",
    note: str = "",
) -> str:
    """Draw one line or several; all have the same names at the same places.

    >>> "polyline" in lines("Orders", [("Monday", 1), ("Tuesday", 3)])
    True
    """
    series = {title: points} if isinstance(points, Sequence) else points
    names = [name for name, _ in next(iter(series.values()), ())]
    if not names:
        return figure(title, _nothing(), note=note)
    top = _top(value for line in series.values() for _, value in line)
    drawn = "".join(_band(band, len(names)) for band in bands)
    drawn += _grid(top) + _names_below(names, x)
    for number, line in enumerate(series.values()):
        drawn += _line(line, top, number)
    if len(series) > 1:
        drawn += _legend(list(series))
    head = [x or "", *series]
    rows = [
        [name, *(number_text(line[place][1]) for line in series.values())]
        for place, name in enumerate(names)
    ]
    rows += [[f"{band.text} (from step {band.start:.1f} to {band.end:.1f})"] for band in bands]
    return figure(title, drawn, head, rows, note=note)


def columns(title: str, points: Sequence[Point], *, x: str = "", note: str = "") -> str:
    """Draw a column for each point."""
    if not points:
        return figure(title, _nothing(), note=note)
    top = _top(value for _, value in points)
    step = (WIDTH - LEFT - RIGHT) / len(points)
    drawn = _grid(top) + _names_below([name for name, _ in points], x, centred=True)
    for place, point in enumerate(points):
        y, left = _y(point[1], top), LEFT + (place + 0.12) * step
        drawn += (
            f'<rect class="s0" x="{left:.1f}" width="{step * 0.76:.1f}" rx="2"'
            f' y="{y:.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
            f"<title>{_tooltip(point)}</title></rect>"
        )
    rows = [[name, number_text(value)] for name, value in points]
    return figure(title, drawn, [x or "", title], rows, note=note)


def bars(title: str, points: Sequence[Point], *, unit: str = "", note: str = "") -> str:
    """Draw a horizontal bar for each point."""
    if not points:
        return figure(title, _nothing(), note=note)
    top = max(*(value for _, value in points), 0) or 1.0
    room = WIDTH - _NAMES - 125
    drawn = ""
    for place, point in enumerate(points):
        name, value = point
        y, width = place * ROW + 4, max(value, 0) / top * room
        label = number_text(value) + (f" {unit}" if unit else "")
        drawn += (
            f'<text class="name" x="{_NAMES - 10}" y="{y + 17}" text-anchor="end">'
            f"{escape(_short(name))}<title>{escape(name)}</title></text>"
            f'<rect class="s0" x="{_NAMES}" y="{y}" height="{ROW - 8}" width="{width:.1f}" rx="2">'
            f"<title>{_tooltip(point)}</title></rect>"
            f'<text x="{_NAMES + width + 6:.1f}" y="{y + 17}">{escape(label)}</text>'
        )
    rows = [[name, number_text(value)] for name, value in points]
    height = len(points) * ROW + 6
    return figure(title, drawn, ["", unit or title], rows, size=(WIDTH, height), note=note)


def flow(title: str, steps: Sequence[Step], *, note: str = "") -> str:
    """Draw boxes from left to right; texts above name what joins, texts below what leaves."""
    width, gap, box, edge = 1_080, 26, 62, 12
    top = 46
    size = (width - 2 * edge - gap * (len(steps) - 1)) / max(len(steps), 1)
    drawn = ""
    for number, step in enumerate(steps):
        x = edge + number * (size + gap)
        middle = x + size / 2
        drawn += (
            f'<rect class="box" x="{x:.1f}" y="{top}" width="{size:.1f}" height="{box}" rx="8"/>'
            f'<text class="big" x="{middle:.1f}" y="{top + 28}" text-anchor="middle">'
            f"{number_text(step.value)}</text>"
            f'<text x="{middle:.1f}" y="{top + 48}" text-anchor="middle">{escape(step.name)}</text>'
        )
        if number:
            drawn += _arrow(x - gap + 3, top + box / 2, x - 3, top + box / 2)
        drawn += _notes(step.joined, middle, top - 18 - 14 * (len(step.joined) - 1), top - 3)
        drawn += _notes(step.left, middle, top + box + 30, top + box + 3)
    rows = [
        [step.name, number_text(step.value), "; ".join(step.joined + step.left)] for step in steps
    ]
    return figure(
        title, drawn, ["", "number", "on the way"], rows, size=(width, top + box + 52), note=note
    )


def _notes(texts: Sequence[str], x: float, y: float, end: float) -> str:
    """Draw texts below each other, and an arrow between them and the box."""
    if not texts:
        return ""
    drawn = "".join(
        f'<text class="aside" x="{x:.1f}" y="{y + 14 * number}" text-anchor="middle">'
        f"{escape(text)}</text>"
        for number, text in enumerate(texts)
    )
    below = y > end
    start = end if below else y + 14 * (len(texts) - 1) + 4
    stop = y - 12 if below else end
    return drawn + _arrow(x, start, x, stop)


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    tip = f"{x2 - 6:.1f},{y2 - 4:.1f} {x2 - 6:.1f},{y2 + 4:.1f}"
    if x1 == x2:
        tip = f"{x2 - 4:.1f},{y2 - 6:.1f} {x2 + 4:.1f},{y2 - 6:.1f}"
    return (
        f'<line class="arrow" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        f'<polygon class="tip" points="{x2:.1f},{y2:.1f} {tip}"/>'
    )


# --- the frame ------------------------------------------------------------------------------


def figure(
    title: str,
    drawn: str,
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    note: str = "",
) -> str:
    """Wrap a drawing with its title, a note, and its numbers as a table."""
    label = escape(title)
    box = f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{label}"'
    remark = f"<p>{escape(note)}</p>" if note else ""
    numbers = ""
    if rows:
        numbers = f"<details><summary>The numbers</summary>{table(head, rows, label)}</details>"
    head_of_figure = f"<figcaption>{label}</figcaption>{remark}"
    return f"<figure>{head_of_figure}<svg {box}>{drawn}</svg>{numbers}</figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str = "") -> str:
    """Build a table of text; the first column names the row."""
    named = f' aria-label="{label}"' if label else ""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scrolls" tabindex="0"><table{named}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def number_text(value: float) -> str:
    """Format a number with separators, and with decimals below 100."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


# --- parts ----------------------------------------------------------------------------------


def _top(values: object) -> float:
    """Return the end of the scale: a round number that no value exceeds."""
    most = max((float(value) for value in values), default=0.0)  # type: ignore[attr-defined]
    if most <= 0:
        return 1.0
    unit = float(10 ** floor(log10(most)))
    return next(unit * step for step in (1, 2, 2.5, 5, 10) if unit * step >= most)


def _grid(top: float) -> str:
    drawn = ""
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(top * part, top)
        kind = "axis" if part == 0 else "grid"
        drawn += (
            f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
        drawn += (
            f'<text x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{_tick(top * part)}</text>'
        )
    return drawn


def _names_below(names: Sequence[str], x: str, *, centred: bool = False) -> str:
    """Draw some of the names, so that they do not overlap."""
    every = max(1, -(-len(names) // _MOST_LABELS))
    drawn = ""
    for place in range(0, len(names), every):
        at = _x(place, len(names))
        if centred:
            at = LEFT + (place + 0.5) * (WIDTH - LEFT - RIGHT) / len(names)
        name = escape(_of_axis(names[place]))
        drawn += f'<text x="{at:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{name}</text>'
    if x:
        drawn += (
            f'<text class="muted" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">'
            f"{escape(x)}</text>"
        )
    return drawn


def _line(points: Sequence[Point], top: float, number: int) -> str:
    places = [(_x(place, len(points)), _y(value, top)) for place, (_, value) in enumerate(points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline class="l{number}" points="{path}"/>'
    radius = 2.4 if len(points) <= _MAX_DOTS else 0.8
    for (x, y), point in zip(places, points, strict=True):
        drawn += (
            f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{_tooltip(point)}</title></circle>"
        )
    return drawn


def _band(band: Band, count: int) -> str:
    """Draw the span behind the lines, and its label above the plot, where no line can be."""
    start, end = _x(band.start, count), _x(band.end, count)
    side = "start" if start < WIDTH * 0.5 else "end"
    at = max(start - 4, LEFT) if side == "start" else end + 4
    height = HEIGHT - BOTTOM - TOP
    return (
        f'<rect class="band" x="{start:.1f}" y="{TOP}" width="{max(end - start, 2):.1f}"'
        f' height="{height}"/>'
        f'<line class="mark" x1="{start:.1f}" y1="{TOP}" x2="{start:.1f}" y2="{TOP + height}"/>'
        f'<text class="mark" x="{at:.1f}" y="{TOP - 10}" text-anchor="{side}">'
        f"{escape(band.text)}</text>"
    )


def _legend(names: Sequence[str]) -> str:
    drawn, at = "", float(LEFT)
    for number, name in enumerate(names):
        drawn += (
            f'<rect class="s{number}" x="{at:.0f}" y="1" width="12" height="12" rx="2"/>'
            f'<text x="{at + 18:.0f}" y="12">{escape(name)}</text>'
        )
        at += 44 + 8 * len(name)
    return drawn


def _x(place: float, count: int) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT) / max(count - 1, 1)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - max(value, 0.0) / top * (HEIGHT - TOP - BOTTOM)


def _tick(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 10 or (value >= size and value % size == 0):
            return f"{value / size:g}{letter}"
    return f"{value:,g}"


def _tooltip(point: Point) -> str:
    return f"{escape(point[0])}: {number_text(point[1])}"


def _of_axis(name: str) -> str:
    """Cut the year off a day, for want of width; the table has it."""
    return name[5:] if len(name) == 10 and name[4] == name[7] == "-" else name


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"


def _nothing() -> str:
    return f'<text x="{LEFT}" y="{HEIGHT / 2}">no rows yet</text>'
