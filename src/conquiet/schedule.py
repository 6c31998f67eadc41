"""Call handlers on a schedule: cron expressions in a time zone, and fixed intervals.

    schedule ──due by the clock of the store──▶ tick, a message ──▶ inbox ──▶ handler
                 └ in one transaction with it, `next_at` of the schedule moves on

A tick's id is made of schedule and time. The state of a schedule is kept in the app's store, and
`next_at` moves from what was read to what follows it, or not at all: of several processes one
writes a tick, and there is no leader.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec

from conquiet.backoff import Backoff
from conquiet.config import require
from conquiet.errors import ConfigError, NotFound
from conquiet.message import Message

logger = logging.getLogger("conquiet.app")

Missed = Literal["skip", "one", "all"]
MISSED_SECONDS = 60.0
"""A tick that is older when a process finds it was missed."""
KIND = "tick"
"""The attribute `kind` of a tick."""
_MAX_TICKS = 1_000
"""How many missed ticks one transaction writes."""
_LOOK_SECONDS = 2.0
"""How often at least a process looks at the schedules, which others may pause or resume."""
_STOP_SECONDS = 10.0
"""How long a stop waits for the store."""
_SPANS = (3_600.0, 86_400.0, 31 * 86_400.0, 366 * 86_400.0, math.inf)


class Tick(msgspec.Struct, frozen=True):
    """One call of a schedule: which one, and the time at which it was due."""

    schedule: str
    """Its name, by default that of the function."""
    time: datetime
    """When the call was due, with its time zone; it may run later."""


class Schedule:
    """Says when a handler is called: by a cron expression in a time zone, or every so many seconds.

    >>> from datetime import datetime, UTC
    >>> noon = Schedule("lunch", cron="0 12 * * MON-FRI", zone="Europe/Berlin")
    >>> str(noon.after(datetime(2026, 1, 2, 23, tzinfo=UTC)))
    '2026-01-05 11:00:00+00:00'

    Intervals are counted from 1970-01-01 UTC, so that all processes agree: every 300 seconds is at
    minute 0, 5, 10, ….
    """

    def __init__(
        self,
        name: str,
        *,
        cron: str | None = None,
        zone: str = "UTC",
        seconds: float = 0.0,
        missed: Missed = "one",
    ) -> None:
        if not name or "\0" in name or len(name) > 200:
            raise ConfigError(f"schedule {name!r:.60}: give it a name of 1 to 200 characters")
        if missed not in get_args(Missed):
            choices = ", ".join(get_args(Missed))
            raise ConfigError(f"schedule {name}: missed={missed!r:.40}: choose one of {choices}")
        if cron is not None and not isinstance(cron, str):
            raise ConfigError(f"schedule {name}: cron={cron!r:.40}: write it as '0 6 * * MON'")
        if (cron is None) == (not seconds):
            raise ConfigError(
                f"schedule {name}: give a cron expression or an interval, as in"
                " @app.every('0 6 * * MON', zone='Europe/Berlin') or @app.every(minutes=5)"
            )
        self.name = name
        self.missed: Missed = missed
        self._cron = None if cron is None else " ".join(cron.split())
        self._zone = _find_zone(name, zone)
        self._seconds = 0
        if self._cron is None:
            if zone != "UTC":
                raise ConfigError(f"schedule {name}: an interval has no zone; leave it out")
            self._seconds = _whole_seconds(name, seconds)
        else:
            self._check_cron(self._cron)
        interval = f"every {_span(self._seconds)}"
        self.definition = interval if cron is None else f"{self._cron} {zone}"
        """Text that is equal for schedules with the same times."""

    def _check_cron(self, cron: str) -> None:
        if len(cron.split()) != 5:
            raise ConfigError(
                f"schedule {self.name}: {cron!r:.60} has {len(cron.split())} fields; write minute,"
                " hour, day of the month, month and day of the week, as in '0 6 * * MON'"
            )
        simulator = require("cronsim", "cron")
        try:
            next(self._times_of_cron(cron, 0.0))
        except simulator.CronSimError as error:
            raise ConfigError(f"schedule {self.name}: {cron!r:.60}: {error}") from None
        except StopIteration:
            raise ConfigError(
                f"schedule {self.name}: {cron!r:.60}: no such time within 50 years"
            ) from None

    def after(self, moment: datetime) -> datetime:
        """Return the first time after a moment."""
        if moment.tzinfo is None:
            raise ConfigError(f"{moment!r} has no time zone; add tzinfo=UTC")
        return datetime.fromtimestamp(self.following(moment.timestamp()), UTC)

    def following(self, moment: float) -> float:
        """Return the first time after a moment, both in seconds since 1970."""
        return next(found for found in self._times(moment) if found > moment)

    def due(self, since: float, now: float) -> tuple[Sequence[float], float]:
        """Return the ticks to write of those from `since` to `now`, and the time that follows.

        Of several, `missed` chooses: "all" of them, the last "one", or with "skip" the last one
        unless it is more than a minute old.
        """
        if self.missed == "all":
            ticks = list(islice(self._between(since, now), _MAX_TICKS))
            return ticks, self.following(ticks[-1] if len(ticks) == _MAX_TICKS else now)
        last = self._last(since, now)
        if last is None or (self.missed == "skip" and now - last > MISSED_SECONDS):
            return (), self.following(now)
        return (last,), self.following(now)

    def _between(self, since: float, now: float) -> Iterator[float]:
        times = (found for found in self._times(since - 0.001) if found >= since)
        return takewhile(lambda found: found <= now, times)

    def _last(self, since: float, now: float) -> float | None:
        """Return the last time up to `now`; looking at a short while before it first."""
        for span in _SPANS:
            found = deque(self._between(max(since, now - span), now), maxlen=1)
            if found or now - span <= since:
                return found[0] if found else None
        return None

    def _times(self, moment: float) -> Iterator[float]:
        """Yield the times from about a moment on, in order."""
        if self._cron is not None:
            return self._times_of_cron(self._cron, moment)
        return self._times_of_interval(moment)

    def _times_of_interval(self, moment: float) -> Iterator[float]:
        count = math.floor(moment / self._seconds)
        while True:
            yield float(count * self._seconds)
            count += 1

    def _times_of_cron(self, cron: str, moment: float) -> Iterator[float]:
        simulator = require("cronsim", "cron")
        start = datetime.fromtimestamp(math.floor(moment), self._zone)
        last = -math.inf
        for found in simulator.CronSim(cron, start):
            time = found.timestamp()
            if time > last:  # in the second of two equal hours it begins with times of the first
                last = time
                yield time

    def tick(self, time: float, topic: str, source: str) -> Message[Tick]:
        """Return the message of a tick; its id is made of schedule and time."""
        moment = datetime.fromtimestamp(time, UTC)
        text = moment.isoformat().replace("+00:00", "Z")
        attributes = {
            "specversion": "1.0",
            "id": f"{self.name}@{text}",
            "type": type_of(self.name),
            "source": source,
            "time": text,
            "datacontenttype": "application/json",
            "kind": KIND,
        }
        return Message(Tick(self.name, moment), attributes, topic=topic)

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {self.definition}>"


def type_of(name: str) -> str:
    """Return the message type of a schedule's ticks."""
    return f"tick.{name}"


def _find_zone(name: str, zone: str) -> Any:
    if zone == "UTC":
        return UTC
    from zoneinfo import ZoneInfo  # slow to import

    try:
        return ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError):
        raise ConfigError(
            f"schedule {name}: zone={zone!r:.60} is not known; write Europe/Berlin, and on a"
            " machine without time zones: pip install tzdata"
        ) from None


def _span(seconds: int) -> str:
    """Write an interval in the largest unit that it is a multiple of.

    >>> _span(300), _span(90), _span(7_200), _span(86_400)
    ('5 min', '90 s', '2 h', '1 d')
    """
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    return next(f"{seconds // size} {unit}" for size, unit in units if seconds % size == 0)


def _whole_seconds(name: str, seconds: float) -> int:
    if not 1 <= seconds < 1e9 or seconds != int(seconds):
        raise ConfigError(
            f"schedule {name}: an interval of {seconds:g} s; whole seconds, at least 1"
        )
    return int(seconds)


# --- its state ------------------------------------------------------------------------------


class State(NamedTuple):
    """The state of a schedule in the store; times are seconds since 1970, by the store's clock."""

    name: str
    definition: str
    next_at: float
    is_paused: bool = False
    last_at: float | None = None
    """The last tick that was written by itself."""


class States(Protocol):
    """Keeps the states of one app's schedules."""

    def read(self) -> tuple[float, Sequence[State]]:
        """Return the time of the store, and all states."""

    def replace(
        self, former: State | None, state: State | None, ticks: Sequence[Message[Any]] = ()
    ) -> bool:
        """Store a state and ticks in one transaction, if the stored one is still the former.

        None for a state that does not exist, or that shall not exist any more.
        """


class Entry(NamedTuple):
    """A schedule as code and store know it."""

    name: str
    schedule: Schedule | None
    """None if the code has it no longer: the state in the store is stale."""
    state: State | None
    """None if no process with it has started yet."""

    @property
    def definition(self) -> str:
        some = self.schedule or self.state
        assert some is not None, "one of the two knows it"
        return some.definition

    @property
    def status(self) -> str:
        """Return `new`, `active`, `paused` or `stale`."""
        if self.schedule is None:
            return "stale"
        if self.state is None:
            return "new"
        return "paused" if self.state.is_paused else "active"

    @property
    def is_changed(self) -> bool:
        """Return whether the store still has the times of another release."""
        if self.schedule is None or self.state is None:
            return False
        return self.schedule.definition != self.state.definition

    @property
    def next_text(self) -> str | None:
        """Return the time of the next tick; None if none is planned."""
        if self.schedule is None or self.state is None:
            return None
        return _text(self.state.next_at)

    @property
    def last_text(self) -> str | None:
        """Return the time of the last tick; None if there was none."""
        if self.state is None or self.state.last_at is None:
            return None
        return _text(self.state.last_at)


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Schedules:
    """The schedules of an app: registers them in its store, writes due ticks, pauses, resumes."""

    def __init__(
        self,
        schedules: Mapping[str, Schedule],
        states: States,
        topic: str,
        source: str,
        publish: Callable[[Sequence[Message[Any]]], None],
    ) -> None:
        self._schedules = schedules
        self._states = states
        self._topic = topic
        self._source = source
        self._publish = publish

    def register(self) -> None:
        """Store new schedules, and the times of those that the code has changed."""
        now, states = self._states.read()
        known = {state.name: state for state in states}
        for schedule in self._schedules.values():
            state = known.get(schedule.name)
            if state is None or state.definition != schedule.definition:
                self._store(schedule, state, now)

    def _store(self, schedule: Schedule, former: State | None, now: float) -> None:
        state = State(schedule.name, schedule.definition, schedule.following(now))
        if former is not None:
            state = state._replace(is_paused=former.is_paused, last_at=former.last_at)
        self._states.replace(former, state)  # if not, another process was faster

    def beat(self) -> float:
        """Write the ticks that are due; return the seconds until the next one, at most 2."""
        now, states = self._states.read()
        known = {state.name: state for state in states}
        wait = _LOOK_SECONDS
        for schedule in self._schedules.values():
            state = known.get(schedule.name)
            if state is None:  # it was removed as stale by an older release
                self._store(schedule, None, now)
            elif state.definition != schedule.definition:
                # Another release has changed it, and writes its ticks: unless it is gone.
                if now - state.next_at > MISSED_SECONDS:
                    self._store(schedule, state, now)
            elif state.next_at <= now:
                wait = min(wait, max(0.0, self._fire(schedule, state, now) - now))
            elif state.next_at > schedule.following(now + MISSED_SECONDS):
                logger.warning(
                    "schedule %s: the clock of the store was ahead, so that its next tick was"
                    " planned for %s; it is corrected",
                    *(schedule.name, _text(state.next_at)),
                )
                self._store(schedule, state, now)
            else:
                wait = min(wait, state.next_at - now)
        return wait

    def _fire(self, schedule: Schedule, state: State, now: float) -> float:
        times, following = schedule.due(state.next_at, now)
        if state.is_paused:
            times, following = (), schedule.following(now)
        moved = state._replace(next_at=following, last_at=times[-1] if times else state.last_at)
        ticks = [schedule.tick(time, self._topic, self._source) for time in times]
        self._states.replace(state, moved, ticks)
        return following

    # --- by hand ----------------------------------------------------------------------------

    def list(self) -> list[Entry]:
        """Return all schedules, by name: those of the code, and stale ones of the store."""
        _, states = self._states.read()
        known = {state.name: state for state in states}
        names = sorted({*known, *self._schedules})
        return [Entry(name, self._schedules.get(name), known.get(name)) for name in names]

    def set_paused(self, name: str, is_paused: bool) -> bool:
        """Pause or resume a schedule; return False if it was so before.

        The ticks of a pause are never written.
        """
        while True:
            now, states = self._states.read()
            state = next((state for state in states if state.name == name), None)
            if state is None:
                self._find(name)
                self.register()
                continue
            if state.is_paused == is_paused:
                return False
            since = state.next_at if is_paused else max(state.next_at, now)
            if self._states.replace(state, state._replace(is_paused=is_paused, next_at=since)):
                return True

    def run(self, name: str, time: float | None = None) -> str:
        """Write a tick at once, also of a paused schedule; return its id.

        Its time is that of the store, unless another one is given.
        """
        schedule = self._find(name)
        tick = schedule.tick(
            self._states.read()[0] if time is None else time, self._topic, self._source
        )
        self._publish([tick])
        return tick.id

    def forget(self, name: str) -> None:
        """Remove the state of a schedule that the code has no longer."""
        if name in self._schedules:
            raise ConfigError(f"schedule {name} is in the code; pause it, or remove it there first")
        _, states = self._states.read()
        state = next((state for state in states if state.name == name), None)
        if state is None:
            raise self._missing(name)
        self._states.replace(state, None)

    def _find(self, name: str) -> Schedule:
        schedule = self._schedules.get(name)
        if schedule is None:
            raise self._missing(name)
        return schedule

    def _missing(self, name: str) -> NotFound:
        known = ", ".join(sorted(self._schedules)) or "none"
        return NotFound(f"the app has no schedule {name!r:.80}; it has: {known}")


class Clock:
    """Writes the ticks of an app's schedules, in a thread; several processes may do so at once."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conquiet-clock", daemon=True)

    def start(self) -> None:
        """Register the schedules, and start."""
        self._schedules.register()
        self._thread.start()

    def _run(self) -> None:
        pauses = Backoff(first=0.1, cap=5.0)
        while not self._stopping.is_set():
            try:
                wait = self._schedules.beat()
                pauses.reset()
            except Exception as error:  # noqa: BLE001 - the store may be back later
                wait = pauses.next()
                logger.warning("could not look at the schedules, again in %.1f s: %s", wait, error)
            self._stopping.wait(max(wait, 0.001))

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
