"""Replay: events judged again after a fix: days of `raw_events`, or what is in the quarantine."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conquiet.errors import ConfigError
from conquiet.lake import facts, silver
from conquiet.lake.definition import EPOCH
from conquiet.lake.journal import Batch
from conquiet.lake.judge import ENTRIES, Judge
from conquiet.lake.schema import arrange
from conquiet.lake.tables import CHANGE, DataFile
from conquiet.lake.tasks import collector_paused

if TYPE_CHECKING:
    from conquiet.lake.pipeline import Driver, Pipeline

_ANY_DAY = (silver.NO_DAY, 2**31 - 1)


# --- days ---------------------------------------------------------------------------------------


def replay_days(driver: Driver, since: date | None, until: date | None) -> int:
    """Judge the entries of some days (UTC, of the attribute `time`) again, and make facts again
    from all events; return the number of days.

    In the driver's memory are some numbers per entry of raw_events, and the rows of one file.
    """
    if since is not None and until is not None and since >= until:
        raise ConfigError(f"since={since} is not before until={until}: name at least one day")
    low = _ANY_DAY[0] if since is None else (since - EPOCH.date()).days
    high = _ANY_DAY[1] if until is None else (until - EPOCH.date()).days - 1
    store, files = driver.store, driver.files
    start = len(files.uri("raw_events", ""))
    names = [uri[start:] for uri in store.files("raw_events")]
    parts = [silver.RawFile(DataFile(one, 0, 0, "")) for one in names]
    found = driver.tasks.map(silver.look, [silver.LookTask(files, one) for one in parts])
    chosen = [(one.days >= low) & (one.days <= high) for one in found]
    days = {int(day) for one, mask in zip(found, chosen, strict=True) for day in one.days[mask]}
    if not days:
        return 0
    last = driver.journal.last_of("replay")
    record = Batch(driver.journal.next_number, "replay", last + 1, rebuild=True)
    driver.step("days found", record.number)
    work = _work(driver, found, silver.plan(found, None, chosen))
    others = _accepted(driver, found, silver.plan(found, None, [~mask for mask in chosen]))
    work += _work(driver, found, others, with_silver=False)
    silver.run_judge(
        record,
        work,
        files,
        driver.tasks,
        lambda done, total: driver.step(f"{done:,} of {total:,} files judged", record.number),
    )
    for name in silver.schemas(driver.definition):
        if name not in ("raw_events", "expectations"):
            _remove_days(driver, record, name, low, high)
            driver.step(f"{name} divided", record.number)
    _remove_counts(driver, record, low, high)
    driver.known.forget()
    driver.enter(record)
    return len(days)


def _work(
    driver: Driver,
    found: list[silver.Looked],
    planned: list[np.ndarray],
    *,
    with_silver: bool = True,
) -> list[silver.JudgeTask]:
    return [
        silver.JudgeTask(driver.shared, driver.files, one.part, deliveries, with_silver)
        for one, deliveries in zip(found, planned, strict=True)
        if deliveries.any()
    ]


def _accepted(
    driver: Driver, found: list[silver.Looked], planned: list[np.ndarray]
) -> list[np.ndarray]:
    """Skip the rows that silver has refused: only the days that are replayed may change that."""
    tables = [one for one in silver.id_tables(driver.definition) if one != "events_quarantine"]
    known = silver.KnownIds(driver.store, tables)
    return [
        deliveries * known.contains(one.hashes, one.checks, one.days)
        for one, deliveries in zip(found, planned, strict=True)
    ]


def _remove_days(driver: Driver, record: Batch, name: str, low: int, high: int) -> None:
    """Take the rows of some days out of a table; note them, and those that were judged again, as
    changes."""
    files = driver.files
    record.change(name)
    for one in record.files.get(name, []):
        note_changes(driver, record, name, files.read([files.uri(name, one.name)]), 1)
    for uri, least, most in driver.store.ranges(name, "_day"):
        if least is not None and (most < low or least > high):
            continue
        rows = files.read([uri])
        mask = pc.and_(pc.greater_equal(rows["_day"], low), pc.less_equal(rows["_day"], high))
        mask = pc.fill_null(mask, False)
        record.drop(name, uri)
        note_changes(driver, record, name, rows.filter(mask), -1)
        left = rows.filter(pc.invert(mask))
        if len(left):
            record.add(name, silver.write_rows(files, name, left))


def _remove_counts(driver: Driver, record: Batch, low: int, high: int) -> None:
    """Take out what `expectations` has of the days, and of rules over rows, which are counted
    again with the facts."""
    name = "expectations"
    stored = driver.store.files(name)
    if not stored:
        return
    rows = driver.files.read(stored)
    definition = driver.definition
    events = [one.name for one in definition.rules if one.of in definition.structs.values()]
    days = pc.fill_null(rows["day"].cast(pa.int32()), silver.NO_DAY)
    inside = pc.and_(pc.greater_equal(days, low), pc.less_equal(days, high))
    stays = pc.and_(
        pc.is_in(rows["rule"], value_set=pa.array(events, pa.string())), pc.invert(inside)
    )
    record.drop(name, *stored)
    left = rows.filter(stays)
    if len(left):
        record.add(name, driver.files.write(name, left))


def note_changes(driver: Driver, record: Batch, name: str, rows: pa.Table, sign: int) -> None:
    """Write removed or added rows for the marts and queries of the next refresh."""
    if not len(rows):
        return
    signs = pa.array(np.full(len(rows), sign, np.int8))
    uri = facts.write_changes(driver.files, name, rows.append_column(CHANGE, signs))
    record.change(name, uri)


# --- quarantine ---------------------------------------------------------------------------------


class Quarantine:
    """The events of a pipeline that were refused."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def list(self, reason: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """Return refused events, the newest first."""
        rows = self._pipeline.read("events_quarantine")
        if reason is not None:
            rows = rows.filter(pc.equal(rows["reason"], reason))
        rows = rows.sort_by([("first_seen_at", "descending"), ("entry_id", "descending")])
        found: list[dict[str, Any]] = (rows if limit is None else rows.slice(0, limit)).to_pylist()
        return found

    def retry(self, reason: str | None = None) -> int:
        """Judge refused events again; return how many were accepted. Facts and SQL tables follow
        at once."""
        with self._pipeline.driver() as driver:
            driver.refresh()
            count = retry_quarantine(driver, reason)
            driver.refresh()
            return count


def retry_quarantine(driver: Driver, reason: str | None) -> int:
    name = "events_quarantine"
    files = driver.files
    record = Batch(driver.journal.next_number, "retry", driver.journal.last_of("retry") + 1)
    judge = Judge(driver.definition)
    tried: list[pa.Table] = []
    kept: list[pa.Table] = []
    for uri in driver.store.files(name):
        rows = files.read([uri])
        mask = pc.not_equal(rows["reason"], "malformed_entry")
        if reason is not None:
            mask = pc.and_(mask, pc.equal(rows["reason"], reason))
        if pc.any(mask).as_py():
            record.drop(name, uri)
            tried.append(rows.filter(mask))
            kept.append(rows.filter(pc.invert(mask)))
    if not tried:
        return 0
    before = pa.concat_tables(tried)
    with collector_paused():
        judged = judge.judge(_entries(before))
    accepted = len(before) - len(judged.quarantine)
    if not accepted and judged.quarantine["reason"].equals(before["reason"]):
        return 0
    left = pa.concat_tables([*kept, judged.quarantine])
    quarantined = judged.quarantine
    judged.quarantine = quarantined.slice(0, 0)
    result = silver.JudgeResult()
    silver.write_judged(files, judged, judge, result)
    for table, written in result.files.items():
        record.add(table, *written)
    record.feed += result.feed
    if len(left):
        record.add(name, silver.write_rows(files, name, left))
    note_changes(driver, record, name, before, -1)
    note_changes(driver, record, name, quarantined, 1)
    record.add("expectations", *silver.write_counts(files, result.counts))
    driver.enter(record)
    return accepted


def _entries(rows: pa.Table) -> pa.Table:
    """Return rows of the quarantine in the columns that are judged."""
    given = {
        "type": rows["event_type"],
        "time": rows["created_at"],
        "entry_time": rows["first_seen_at"],
        "subject": rows["aggregate_id"],
        "_malformed": pa.nulls(len(rows), pa.string()),
    }
    return arrange(rows, ENTRIES, given)
