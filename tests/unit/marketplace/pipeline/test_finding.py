"""Which days of silver have to be read: those in which an order's or a token's events can be."""

from __future__ import annotations

from datetime import date

from marketplace.pipeline.finding import within

THERE = {None, *(date(2026, 3, day) for day in range(1, 11))}


def test_the_days_of_a_span_that_are_there_and_those_without_a_time() -> None:
    spans = {(date(2026, 2, 27), date(2026, 3, 2)), (date(2026, 3, 9), date(2026, 3, 9))}
    assert within(spans, THERE) == {
        None,
        date(2026, 3, 1),
        date(2026, 3, 2),
        date(2026, 3, 9),
    }
    assert within(spans, THERE - {None}) == {date(2026, 3, day) for day in (1, 2, 9)}


def test_nothing_but_what_has_no_time_if_there_is_no_span() -> None:
    assert within(set(), THERE) == {None}


def test_every_day_if_a_span_is_not_known() -> None:
    assert within({(None, None), (date(2026, 3, 2), date(2026, 3, 2))}, THERE) == THERE
