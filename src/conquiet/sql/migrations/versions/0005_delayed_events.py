"""The table of events that wait until they are due.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import postgresql

from conquiet.sql.schema import split_name

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    delayed = f"{table}_delayed"
    if sa.inspect(op.get_bind()).has_table(delayed, schema=schema):
        return
    op.create_table(
        delayed,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("due_at", MOMENT, nullable=False),
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
        schema=schema,
    )
    op.create_index(f"{delayed}_due", delayed, ["due_at", "id"], schema=schema)
    op.create_index(f"{delayed}_event", delayed, ["event_id"], schema=schema)


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        op.drop_table(f"{table}_delayed", schema=schema)
