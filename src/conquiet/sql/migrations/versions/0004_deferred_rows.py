"""The indexes of rows that failed, for relays that follow the write-ahead log.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.schema import split_name

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    deferred = "published_at IS NULL AND parked_at IS NULL AND last_error IS NOT NULL"
    for suffix, columns, where in (
        ("deferred", ["id"], deferred),
        ("deferred_key", ["key", "id"], f'{deferred} AND "key" IS NOT NULL'),
    ):
        op.create_index(
            f"{table}_{suffix}",
            table,
            columns,
            schema=schema,
            if_not_exists=True,
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        for suffix in ("deferred_key", "deferred"):
            op.drop_index(f"{table}_{suffix}", table, schema=schema, if_exists=True)
