"""The table of what handlers and relays did in each minute of the last day.

Frozen: a later change of the table is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.schema import split_name

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    if sa.inspect(op.get_bind()).has_table(f"{table}_history", schema=schema):
        return
    op.create_table(
        f"{table}_history",
        sa.Column("minute", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("figure", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint(
            "minute", "kind", "name", "type", "figure", name=f"{table}_history_pkey"
        ),
        schema=schema,
    )


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        op.drop_table(f"{table}_history", schema=schema)
