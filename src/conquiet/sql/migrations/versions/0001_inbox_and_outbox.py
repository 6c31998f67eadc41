"""The tables of inbox and outbox.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

from conquiet.sql.schema import CurrentTransaction, Xid8, split_name

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    # Tables that exist belong to a pair with another version table, or were created by DDL.
    names = context.config.attributes
    exists = sa.inspect(op.get_bind()).has_table
    for name, create in ((names["inbox"], _create_inbox), (names["outbox"], _create_outbox)):
        if name is not None:
            schema, table = split_name(name)
            if not exists(table, schema=schema):
                create(schema, table)


def downgrade() -> None:
    names = context.config.attributes
    for name in (names["outbox"], names["inbox"]):
        if name is not None:
            schema, table = split_name(name)
            op.drop_table(table, schema=schema)


def _create_inbox(schema: str | None, table: str) -> None:
    op.create_table(
        table,
        sa.Column("subscriber", sa.Text, nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("subscriber", "message_id", name=f"{table}_pkey"),
        schema=schema,
    )
    op.create_index(f"{table}_created_at", table, ["created_at"], schema=schema)


def _create_outbox(schema: str | None, table: str) -> None:
    op.create_table(
        table,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("created_at", MOMENT, nullable=False, server_default=sa.func.now()),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("content_type", sa.Text, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column(
            "attributes",
            sa.JSON().with_variant(postgresql.JSONB(), "postgresql"),
            nullable=False,
        ),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("last_error", sa.Text),
        sa.Column("published_at", MOMENT),
        sa.Column("parked_at", MOMENT),
        sa.Column("xid", Xid8(), nullable=False, server_default=CurrentTransaction()),
        sa.CheckConstraint(
            "published_at IS NULL OR parked_at IS NULL", name=f"{table}_published_or_parked"
        ),
        schema=schema,
        sqlite_autoincrement=True,
    )
    waiting = "published_at IS NULL AND parked_at IS NULL"
    for name, columns, where in (
        ("claimable", ["id"], waiting),
        ("claimable_key", ["key", "id"], f'{waiting} AND "key" IS NOT NULL'),
        ("parked", ["key", "id"], "parked_at IS NOT NULL"),
        ("published_at", ["published_at"], "published_at IS NOT NULL"),
        ("log", ["xid", "id"], None),
    ):
        condition = sa.text(where) if where is not None else None
        op.create_index(
            f"{table}_{name}",
            table,
            columns,
            schema=schema,
            postgresql_where=condition,
            sqlite_where=condition,
        )
