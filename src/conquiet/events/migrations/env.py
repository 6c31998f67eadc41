"""Run by Alembic, with the connection, the table and the enums that `schema` gives it."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes

context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
