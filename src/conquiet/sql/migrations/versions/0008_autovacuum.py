"""The settings of autovacuum of the tables that grow with the traffic, on PostgreSQL.

Frozen: a later change of the tables is a later migration.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import text

from conquiet.sql.schema import vacuum_sooner

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    names = context.config.attributes
    if op.get_bind().dialect.name == "postgresql":
        for statement in vacuum_sooner(names["inbox"], names["outbox"]):
            op.execute(text(statement))


def downgrade() -> None:
    """Leave them: they are as good for the tables before."""
