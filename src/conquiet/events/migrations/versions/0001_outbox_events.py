"""The table of domain events.

Frozen but for the values of the enums, which come from the catalog: a later change of the table
is a later migration, and a later value is added by `schema.migrate`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

from conquiet.events.table import Now, UuidText, create_trigger_statements, drop_trigger_statements
from conquiet.sql.schema import split_name

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    given = context.config.attributes
    schema, table = split_name(given["table"])
    event_type = _enum("event_type_enum", given["event_types"], schema)
    aggregate_type = _enum("aggregate_type_enum", given["aggregate_types"], schema)
    op.create_table(
        table,
        sa.Column("id", UuidText(), primary_key=True),
        sa.Column("event_type", event_type, nullable=False),
        sa.Column("aggregate_type", aggregate_type, nullable=False),
        sa.Column("aggregate_id", UuidText(), nullable=False),
        sa.Column(
            "payload_json",
            sa.JSON().with_variant(postgresql.JSONB(), "postgresql"),
            nullable=False,
        ),
        sa.Column("created_at", MOMENT, nullable=False, server_default=Now()),
        sa.Column("published_at", MOMENT),
        sa.Column("attempt_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("last_error", sa.Text),
        schema=schema,
    )
    waiting = sa.text("published_at IS NULL")
    for name, columns, where in (
        ("published_at", ["published_at"], None),
        ("event_type", ["event_type"], None),
        ("aggregate", ["aggregate_type", "aggregate_id"], None),
        ("unpublished", ["created_at", "id"], waiting),
    ):
        op.create_index(
            f"{table}_{name}",
            table,
            columns,
            schema=schema,
            postgresql_where=where,
            sqlite_where=where,
        )
    if given["trigger"]:
        for statement in create_trigger_statements(op.get_context().dialect.name, given["table"]):
            op.execute(statement)


def downgrade() -> None:
    given = context.config.attributes
    schema, table = split_name(given["table"])
    dialect = op.get_context().dialect.name
    for statement in drop_trigger_statements(dialect, given["table"]):
        op.execute(statement)
    op.drop_table(table, schema=schema)
    if dialect == "postgresql":
        for name in ("event_type_enum", "aggregate_type_enum"):
            sa.Enum(name=name, schema=schema).drop(op.get_bind(), checkfirst=True)


def _enum(name: str, values: tuple[str, ...], schema: str | None) -> sa.Enum:
    return sa.Enum(*values, name=name, schema=schema, length=63, create_constraint=True)
