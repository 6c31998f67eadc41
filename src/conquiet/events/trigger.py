"""The trigger that keeps rows of `outbox_events` as they were stored, whoever updates them."""

from __future__ import annotations

from conquiet.events.table import EVENTS_TABLE, IMMUTABLE, MUTABLE
from conquiet.sql.schema import checked_name

REFUSAL = f"is append-only: only {', '.join(MUTABLE)} can change"


def create_statements(dialect: str, table: str = EVENTS_TABLE) -> list[str]:
    """The statements that create it; each may be sent again."""
    schema, name = checked_name(table)
    if dialect == "sqlite":
        changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in IMMUTABLE)
        return [
            f"CREATE TRIGGER IF NOT EXISTS {name}_append_only BEFORE UPDATE ON {table}\n"
            f"WHEN {changed}\n"
            f"BEGIN SELECT RAISE(ABORT, '{name} {REFUSAL}'); END"
        ]
    function = f"{schema}.{name}_append_only" if schema else f"{name}_append_only"
    old, new = (", ".join(f"{row}.{column}" for column in IMMUTABLE) for row in ("OLD", "NEW"))
    return [
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$\n"
        f"BEGIN RAISE EXCEPTION '{name} {REFUSAL}' USING ERRCODE = 'restrict_violation'; END $$",
        f"DROP TRIGGER IF EXISTS {name}_append_only ON {table}",
        # In WHEN, so that a relay's marks do not pay for the call of a function.
        f"CREATE TRIGGER {name}_append_only BEFORE UPDATE ON {table} FOR EACH ROW\n"
        f"WHEN (ROW({old}) IS DISTINCT FROM ROW({new}))\n"
        f"EXECUTE FUNCTION {function}()",
    ]


def drop_statements(dialect: str, table: str = EVENTS_TABLE) -> list[str]:
    schema, name = checked_name(table)
    if dialect == "sqlite":
        return [f"DROP TRIGGER IF EXISTS {name}_append_only"]
    function = f"{schema}.{name}_append_only" if schema else f"{name}_append_only"
    return [
        f"DROP TRIGGER IF EXISTS {name}_append_only ON {table}",
        f"DROP FUNCTION IF EXISTS {function}()",
    ]
