"""Charts as inline SVG: lines over days, and bars. They need no script and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 180, 34

Point = tuple[str, float]
"""What it is called, and how much."""


def lines(title: str, points: Sequence[Point]) -> str:
    """A line from left to right.

    >>> "polyline" in lines("Orders", [("Monday", 1), ("Tuesday", 3)])
    True
    """
    if not points:
        return _figure(title, _nothing())
    top = max(max(value for _, value in points), 1)
    step = (WIDTH - 2 * MARGIN) / max(len(points) - 1, 1)
    places = [
        (MARGIN + number * step, _height(value, top)) for number, (_, value) in enumerate(points)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{_said(point)}</title></circle>'
        for (x, y), point in zip(places, points, strict=True)
    )
    drawn = f'<polyline points="{path}" fill="none" stroke="#2563eb" stroke-width="2"/>{dots}'
    return _figure(title, _frame(top, points[0][0], points[-1][0]) + drawn)


def bars(title: str, points: Sequence[Point]) -> str:
    """A bar to the right for each point."""
    if not points:
        return _figure(title, _nothing())
    top = max(max(value for _, value in points), 1)
    row = (HEIGHT - 10) / len(points)
    drawn = "".join(
        f'<text x="4" y="{5 + (number + 0.65) * row:.1f}">{escape(name)}</text>'
        f'<rect x="180" y="{5 + number * row:.1f}" height="{row * 0.8:.1f}"'
        f' width="{max(value, 0) / top * (WIDTH - 300):.1f}" fill="#2563eb"/>'
        f'<text x="{186 + max(value, 0) / top * (WIDTH - 300):.1f}"'
        f' y="{5 + (number + 0.65) * row:.1f}">{value:,.0f}</text>'
        for number, (name, value) in enumerate(points)
    )
    return _figure(title, drawn)


def _figure(title: str, drawn: str) -> str:
    label = escape(title)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    return f"<figure><figcaption>{label}</figcaption><svg {box}>{drawn}</svg></figure>"


def _frame(top: float, first: str, last: str) -> str:
    bottom = HEIGHT - MARGIN
    return (
        f'<line x1="{MARGIN}" y1="{bottom}" x2="{WIDTH - MARGIN}" y2="{bottom}" stroke="#999"/>'
        f'<text x="{MARGIN}" y="{MARGIN - 14}">{top:,.0f}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 12}">{escape(first)}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">{escape(last)}</text>'
    )


def _height(value: float, top: float) -> float:
    return HEIGHT - MARGIN - max(value, 0) / top * (HEIGHT - 2 * MARGIN)


def _said(point: Point) -> str:
    return f"{escape(point[0])}: {point[1]:,.0f}"


def _nothing() -> str:
    return f'<text x="{MARGIN}" y="{HEIGHT / 2}">no rows yet</text>'
