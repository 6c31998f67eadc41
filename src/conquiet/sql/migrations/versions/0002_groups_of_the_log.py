"""The tables of groups that read an outbox as a log.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.schema import split_name

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    exists = sa.inspect(op.get_bind()).has_table
    if not exists(f"{table}_positions", schema=schema):
        _create_positions(schema, table)
    if not exists(f"{table}_retries", schema=schema):
        _create_retries(schema, table)


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        op.drop_table(f"{table}_retries", schema=schema)
        op.drop_table(f"{table}_positions", schema=schema)


def _create_positions(schema: str | None, table: str) -> None:
    op.create_table(
        f"{table}_positions",
        sa.Column("consumer_group", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("xid", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("id", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("settled", sa.Text, nullable=False, server_default="[]"),
        sa.Column("version", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("owner", sa.Text),
        sa.Column("claimant", sa.Text),
        sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
        sa.Column("crashes", sa.Integer, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint(
            "consumer_group", "topic", "partition", name=f"{table}_positions_pkey"
        ),
        schema=schema,
    )


def _create_retries(schema: str | None, table: str) -> None:
    op.create_table(
        f"{table}_retries",
        sa.Column("id", sa.BigInteger, nullable=False),
        sa.Column("consumer_group", sa.Text, nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("xid", sa.BigInteger, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_try", sa.Double, nullable=False),
        sa.Column("last_error", sa.Text),
        sa.Column("traceback", sa.Text),
        sa.Column("dead_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", "consumer_group", name=f"{table}_retries_pkey"),
        schema=schema,
    )
    alive = sa.text("dead_at IS NULL")
    for name, column in (("due", "topic"), ("key", "key")):
        op.create_index(
            f"{table}_retries_{name}",
            f"{table}_retries",
            ["consumer_group", column, "next_try"],
            schema=schema,
            postgresql_where=alive,
            sqlite_where=alive,
        )
