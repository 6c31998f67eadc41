"""Charts of the history: series over minutes, drawn as SVG by the server.

Reading needs no JavaScript: axes and units are there, and each step has a title. A script adds a
line and a label under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from conquiet.errors import ConquietError
from conquiet.operations.history import GAUGES, Entry, Key, span
from conquiet.web import words
from conquiet.web.pulse import Cached
from conquiet.web.stores import Stores

WIDTH, HEIGHT = 1000, 100
"""Of the drawing, which is stretched to the width of the page."""
_LINES = 4
_WRITE_SECONDS = 12
"""Figures of a minute are written until so long after its end."""
_FRESH_SECONDS = 5.0


class Window(NamedTuple):
    """A span of time that charts show, in steps of some minutes."""

    name: str
    title: str
    minutes: int
    step: int


WINDOWS = (
    Window("10m", "10 min", 10, 1),
    Window("1h", "1 h", 60, 1),
    Window("6h", "6 h", 360, 5),
    Window("24h", "24 h", 1_440, 15),
)


def window_of(name: str) -> Window:
    return next((one for one in WINDOWS if one.name == name), WINDOWS[1])


# --- the history of a window ----------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    """What the stores kept of a window."""

    window: Window
    now: float = 0.0
    entries: tuple[Entry, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def steps(self) -> list[int]:
        """Return the first minute of each step that is complete."""
        step = self.window.step
        end = int((self.now - _WRITE_SECONDS) // 60) // step
        return [at * step for at in range(end - self.window.minutes // step, end)]

    @property
    def seconds(self) -> float:
        """Return how long the window is, or how long there has been something in it."""
        return span(self.entries, self.now, self.window.minutes)

    def total(self, chosen: Callable[[Key], bool]) -> float:
        return sum(entry.value for entry in self.entries if chosen(entry.key))

    def series(self, chosen: Callable[[Key], bool], scale: float = 1.0) -> list[float | None]:
        """Return the sums of each step, times `scale`; None where no process has reported."""
        sums: dict[int, float] = {}
        for entry in self.entries:
            if chosen(entry.key):
                sums[entry.minute] = sums.get(entry.minute, 0.0) + entry.value
        known = {entry.minute for entry in self.entries}
        return [sums.get(at, 0.0) * scale if at in known else None for at in self.steps]

    def gauges(self, figure: str) -> list[float | None]:
        """Return the sums of a gauge over all that have it; None where none was looked at."""
        sums: dict[int, float] = {}
        for entry in self.entries:
            if entry.key.figure == figure:
                sums[entry.minute] = sums.get(entry.minute, 0.0) + entry.value
        return [sums.get(at) for at in self.steps]

    def each_step(self, read: Callable[[Mapping[str, float]], float | None]) -> list[float | None]:
        """Return what `read` makes of the figures of each step."""
        found: dict[int, dict[str, float]] = {}
        for entry in self.entries:
            figures = found.setdefault(entry.minute, {})
            figures[entry.key.figure] = figures.get(entry.key.figure, 0.0) + entry.value
        return [read(found.get(at, {})) for at in self.steps]

    def of_handler(self, name: str, type_: str = "") -> Past:
        """Return what one handler did, and when processes reported."""

        def is_of(key: Key) -> bool:
            return key.kind != "handler" or (key.name == name and type_ in ("", key.type))

        kept = tuple(one for one in self.entries if is_of(one.key))
        return Past(self.window, self.now, kept, self.troubles)


class Archive:
    """Reads the history of the stores, once in a while, however many pages are open."""

    def __init__(self, stores: Stores) -> None:
        def reader(window: Window) -> Cached[Past]:
            return Cached(lambda: _read(stores, window), _FRESH_SECONDS)

        self._windows = {window.name: reader(window) for window in WINDOWS}

    def read(self, window: Window) -> Past:
        return self._windows[window.name]()


def _read(stores: Stores, window: Window) -> Past:
    sums: dict[tuple[int, Key], float] = {}
    troubles: list[str] = []
    now = 0.0
    for open_ in stores.keepers():
        try:
            with closing(open_()) as keeper:
                history = keeper.read(window.minutes + 2 * window.step, window.step)
        except ConquietError as error:
            troubles.append(str(error))
            continue
        now = max(now, history.now)
        for entry in history.entries:
            at, former = (entry.minute, entry.key), sums.get((entry.minute, entry.key), 0.0)
            is_gauge = entry.key.figure in GAUGES
            sums[at] = max(former, entry.value) if is_gauge else former + entry.value
    entries = tuple(Entry(*at, value) for at, value in sorted(sums.items()))
    return Past(window, now, entries, tuple(troubles))


# --- drawing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One series of a chart; `style` is a class of the style sheet."""

    name: str
    style: str
    values: Sequence[float | None]
    path: str = ""
    last: str = "–"


@dataclass(frozen=True)
class Column:
    """A step of a chart, with its label; the drawing of what reacts to the pointer."""

    x: float
    width: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A drawing, with its axes."""

    title: str
    unit: str
    lines: Sequence[Line] = ()
    marks: Sequence[str] = ()
    """Of the vertical axis, from the top."""
    times: Sequence[tuple[str, str]] = ()
    """Of the horizontal axis, from the left: what is shown, and the exact time."""
    columns: Sequence[Column] = field(default=(), repr=False)
    grid: Sequence[float] = ()
    """Heights of the horizontal lines."""


def draw(
    title: str,
    unit: str,
    past: Past,
    lines: Iterable[Line],
    show: Callable[[float | None], str] = words.rate,
    mark: Callable[[float], str] = words.mark,
    *,
    whole: bool = False,
) -> Chart:
    """Draw series over the steps of a window; without a value it has no columns.

    With `whole` the numbers of the vertical axis are whole.
    """
    given = list(lines)
    known = [value for line in given for value in line.values if value is not None]
    steps = past.steps
    if not known or not steps:
        return Chart(title, unit)
    top = nice_top(max(known))
    if whole:
        top = float(_LINES * math.ceil(top / _LINES))
    width = WIDTH / len(steps)
    drawn = [
        Line(
            line.name,
            line.style,
            line.values,
            _path(line.values, top, width),
            show(next((value for value in reversed(line.values) if value is not None), None)),
        )
        for line in given
    ]
    columns = [
        Column(round(at * width, 1), round(width, 1), _label(minute, at, given, show, unit))
        for at, minute in enumerate(steps)
    ]
    marks = [mark(top * part / _LINES) for part in range(_LINES, -1, -1)]
    places = [round(part * (len(steps) - 1) / 4) for part in range(5)]
    times = [(_clock(steps[at]), _iso(steps[at])) for at in dict.fromkeys(places)]
    grid = [round(HEIGHT * part / _LINES, 1) for part in range(_LINES + 1)]
    return Chart(title, unit, drawn, marks, times, columns, grid)


def nice_top(value: float) -> float:
    """Return the end of an axis: the next of 1, 2, 4 or 8 times a power of ten.

    >>> nice_top(0), nice_top(3.2), nice_top(41), nice_top(0.0031)
    (1.0, 4.0, 80.0, 0.004)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while value < power:
        power /= 10
    top = next((power * part for part in (1, 2, 4, 8) if value <= power * part), power * 10)
    return float(f"{top:.6g}")


def _path(values: Sequence[float | None], top: float, width: float) -> str:
    """Draw a line through the middles of the columns; a value between gaps is a short line."""
    parts: list[str] = []
    for at, value in enumerate(values):
        if value is None:
            continue
        x, y = (at + 0.5) * width, HEIGHT - min(value, top) / top * HEIGHT
        has_former = at > 0 and values[at - 1] is not None
        has_next = at + 1 < len(values) and values[at + 1] is not None
        parts.append(f"{'L' if has_former else 'M'}{x:.1f} {y:.1f}")
        if not has_former and not has_next:
            parts.append(f"h{width / 2:.1f}")
    return "".join(parts)


def _label(
    minute: int,
    at: int,
    lines: Sequence[Line],
    show: Callable[[float | None], str],
    unit: str,
) -> str:
    shown = (f"{line.name} {show(line.values[at])}" for line in lines)
    return f"{_clock(minute)} · {', '.join(shown)} {unit}".strip()


def _clock(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).strftime("%H:%M")


def _iso(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).strftime("%Y-%m-%dT%H:%MZ")
