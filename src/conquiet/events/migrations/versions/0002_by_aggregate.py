"""The index of claims in the order of aggregates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.tables import checked_name

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema, table = checked_name(context.config.attributes["table"])
    waiting = sa.text("published_at IS NULL")
    op.create_index(
        f"{table}_by_aggregate",
        table,
        ["aggregate_id", "created_at", "id"],
        schema=schema,
        postgresql_where=waiting,
        sqlite_where=waiting,
    )


def downgrade() -> None:
    schema, table = checked_name(context.config.attributes["table"])
    op.drop_index(f"{table}_by_aggregate", table, schema=schema)
