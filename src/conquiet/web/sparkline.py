"""Sparkline: the last few minutes of a number as the path of an SVG."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 28
_MARGIN = 2
"""So that the line is not cut where it is thick."""


def line(values: Sequence[float | None], points: int) -> str:
    """A path from left to right, the newest at the right edge; empty if there is no line.

    >>> line([0, 5, 10], points=3)
    'M0.0 26.0L60.0 14.0L120.0 2.0'
    """
    last = values[-points:]
    known = [value for value in last if value is not None]
    if len(known) < 2:
        return ""
    top = max(known) or 1.0
    step = WIDTH / max(points - 1, 1)
    begin = WIDTH - step * (len(last) - 1)
    return "".join(
        f"{'M' if not at or last[at - 1] is None else 'L'}{begin + at * step:.1f}"
        f" {HEIGHT - _MARGIN - value / top * (HEIGHT - 2 * _MARGIN):.1f}"
        for at, value in enumerate(last)
        if value is not None
    )
