"""Create the table of the history in databases that were made before it."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from conquiet.django.migrations import create_tables
from conquiet.sql import schema


def drop_table(apps: Any, editor: Any) -> None:
    editor.execute(f"DROP TABLE IF EXISTS {schema.OUTBOX_TABLE}_history")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    dependencies = (("conquiet", "0004_errors_of_attempts"),)
    operations = (migrations.RunPython(create_tables, drop_table),)
