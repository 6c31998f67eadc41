"""Alembic's migrations of the tables of conquiet; run by `conquiet.sql.schema.migrate`."""
