"""The table of schedules beside an outbox.

Frozen: a later change of the table is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.schema import split_name

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    if sa.inspect(op.get_bind()).has_table(f"{table}_schedules", schema=schema):
        return
    op.create_table(
        f"{table}_schedules",
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("next_at", sa.Double, nullable=False),
        sa.Column("paused", sa.Integer, nullable=False, server_default="0"),
        sa.Column("last_at", sa.Double),
        sa.PrimaryKeyConstraint("topic", "name", name=f"{table}_schedules_pkey"),
        schema=schema,
    )


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        op.drop_table(f"{table}_schedules", schema=schema)
