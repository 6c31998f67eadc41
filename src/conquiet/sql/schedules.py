"""Keep the states of schedules in a table beside the outbox, and write ticks into the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, text

from conquiet.message import Message
from conquiet.schedule import State
from conquiet.sql.dialect import begin_to_write, raise_store_errors, write_epoch
from conquiet.sql.notification import notify_relays
from conquiet.sql.outbox import Outbox
from conquiet.sql.schema import schedules_table


class Schedules:
    """Keeps the states of one app's schedules; `outbox` takes the ticks."""

    def __init__(self, engine: Engine, outbox: Outbox, topic: str) -> None:
        self._engine = engine
        self._outbox = outbox
        self._topic = topic
        table = engine.dialect.identifier_preparer.format_table(
            schedules_table(outbox.table.fullname)
        )
        now = write_epoch(engine.dialect)
        ours = "topic = :topic AND name = :name"
        same = f"{ours} AND definition = :former AND next_at = :former_at AND paused = :was_paused"
        # One row for the time alone, so that it comes also without schedules.
        self._read = text(
            f"SELECT now.seconds, s.name, s.definition, s.next_at, s.paused, s.last_at"
            f" FROM (SELECT {now} AS seconds) AS now LEFT JOIN {table} AS s ON s.topic = :topic"
        )
        self._insert = text(
            f"INSERT INTO {table} (topic, name, definition, next_at, paused, last_at)"
            " VALUES (:topic, :name, :definition, :next_at, :paused, :last_at)"
            " ON CONFLICT DO NOTHING"
        )
        self._update = text(
            f"UPDATE {table} SET definition = :definition, next_at = :next_at, paused = :paused,"
            f" last_at = :last_at WHERE {same}"
        )
        self._delete = text(f"DELETE FROM {table} WHERE {same}")

    def read(self) -> tuple[float, Sequence[State]]:
        engine = self._engine
        with raise_store_errors(engine), engine.connect() as connection:
            rows = connection.execute(self._read, {"topic": self._topic}).all()
        states = [
            State(row.name, row.definition, row.next_at, bool(row.paused), row.last_at)
            for row in rows
            if row.name is not None
        ]
        return float(rows[0].seconds), states

    def replace(
        self, former: State | None, state: State | None, ticks: Sequence[Message[Any]] = ()
    ) -> bool:
        some = state or former
        assert some is not None, "one of the two exists"
        given: dict[str, Any] = {"topic": self._topic, "name": some.name}
        if state is not None:
            given |= {
                "definition": state.definition,
                "next_at": state.next_at,
                "paused": int(state.is_paused),
                "last_at": state.last_at,
            }
        if former is not None:
            given |= {
                "former": former.definition,
                "former_at": former.next_at,
                "was_paused": int(former.is_paused),
            }
        statement = self._update if state is not None else self._delete
        if former is None:
            statement = self._insert
        engine = self._engine
        with raise_store_errors(engine), begin_to_write(engine) as connection:
            is_replaced = connection.execute(statement, given).rowcount == 1
            if is_replaced and ticks:
                self._outbox.add(connection, ticks)
        if is_replaced and ticks:
            notify_relays(engine, self._outbox.table.fullname)
        return is_replaced
