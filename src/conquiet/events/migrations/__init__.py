"""Alembic's migrations of `outbox_events`, shipped with the package."""
