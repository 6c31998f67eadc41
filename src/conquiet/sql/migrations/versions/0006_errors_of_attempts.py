"""The errors of a message's attempts, beside the last one.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from conquiet.sql.schema import split_name

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is None:
        return
    schema, table = split_name(name)
    retries, tables = f"{table}_retries", sa.inspect(op.get_bind())
    if not tables.has_table(retries, schema=schema):  # it is created with the column
        return
    if all(column["name"] != "errors" for column in tables.get_columns(retries, schema=schema)):
        op.add_column(retries, sa.Column("errors", sa.Text), schema=schema)


def downgrade() -> None:
    name = context.config.attributes["outbox"]
    if name is not None:
        schema, table = split_name(name)
        op.drop_column(f"{table}_retries", "errors", schema=schema)
