"""Say when an event may be published at the earliest: at a time, or after a while.

    at=datetime      a moment with a time zone
    after=seconds    a while that begins when the store writes the event, by the store's clock

An outbox holds such an event, and moves it to the others when it is due by the clock of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.message import Message

Due: TypeAlias = datetime | timedelta
"""A moment, or a while that begins when the event is stored."""

MAX_DELAY = timedelta(days=36_500)
"""The longest while; a moment may be later."""
_LAST = datetime(9999, 12, 31, 23, 59, 59, 999_000)


def due_of(at: datetime | None = None, after: timedelta | float | None = None) -> Due | None:
    """Return when an event is due, by `at` or by `after`; None if neither is given.

    >>> due_of(after=90)
    datetime.timedelta(seconds=90)
    """
    if at is not None and after is not None:
        raise ConfigError("at= and after=: give one of them")
    if at is not None:
        if not isinstance(at, datetime):
            raise ConfigError(f"at={at!r:.60}: give a datetime with a time zone, or after=seconds")
        return check_due(at)
    if after is None:
        return None
    if isinstance(after, timedelta):
        return check_due(after)
    if isinstance(after, bool) or not isinstance(after, (int, float)):
        raise ConfigError(f"after={after!r:.60}: give seconds or a timedelta")
    try:
        return check_due(timedelta(seconds=after))
    except (OverflowError, ValueError):  # infinite, not a number, or too long
        raise ConfigError(f"after={after!r}: at most {MAX_DELAY.days} days") from None


def check_due(due: Due) -> Due:
    """Refuse a moment without a time zone, and a while longer than `MAX_DELAY`."""
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise ConfigError(
                f"{due!r} has no time zone, so it could be any of 26 hours; use"
                " datetime.now(UTC) + …, or datetime(…, tzinfo=ZoneInfo('Europe/Berlin'))"
            )
        return due
    if not isinstance(due, timedelta):
        raise ConfigError(f"notbefore={due!r:.60}: give a datetime with a time zone or a timedelta")
    if due > MAX_DELAY:
        raise ConfigError(f"{due!r}: at most {MAX_DELAY.days} days")
    return due


def is_delayed(message: Message[Any]) -> bool:
    """Return whether a store must hold the message; a while of zero or less is no delay.

    A moment is compared by the store, whose clock may differ from that of this process.
    """
    if message.notbefore is None:
        return False
    due = check_due(message.notbefore)
    return isinstance(due, datetime) or due > timedelta()


def delay_all(messages: Sequence[Message[Any]], due: Due | None) -> None:
    """Set when messages are due, unless a message says so itself."""
    if due is not None:
        for message in messages:
            if message.notbefore is None:
                message.notbefore = due


def split_delayed(
    messages: Iterable[Message[Any]],
) -> tuple[Sequence[Message[Any]], Sequence[Message[Any]]]:
    """Return the messages to publish at once, and those that wait."""
    now: list[Message[Any]] = []
    later: list[Message[Any]] = []
    for message in messages:
        (later if message.notbefore is not None and is_delayed(message) else now).append(message)
    return now, later


def utc_text(moment: datetime) -> str:
    """Return a moment as UTC without an offset: the text that SQLite compares.

    >>> utc_text(datetime.fromisoformat("2026-01-31T12:00:00+01:00"))
    '2026-01-31 11:00:00.000000'
    """
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:  # a zone can push the last day of the year 9999 beyond it
        moment = datetime.max if moment.year > 1 else datetime.min
    # SQLite rounds to milliseconds, and the last one of that year to none at all.
    return min(moment.replace(tzinfo=None), _LAST).isoformat(" ", "microseconds")
