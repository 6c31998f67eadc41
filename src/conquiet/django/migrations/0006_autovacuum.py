"""Give the tables their settings of autovacuum in databases that were made before it."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from conquiet.sql import schema


def vacuum_sooner(apps: Any, editor: Any) -> None:
    if editor.connection.vendor == "postgresql":
        for statement in schema.vacuum_sooner(schema.INBOX_TABLE, schema.OUTBOX_TABLE):
            editor.execute(statement)


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    dependencies = (("conquiet", "0005_history"),)
    operations = (migrations.RunPython(vacuum_sooner, migrations.RunPython.noop),)
