"""Add the column of the errors of attempts to databases that were made before it."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from conquiet.django.transaction import VENDORS
from conquiet.sql import schema

_TABLE = f"{schema.OUTBOX_TABLE}_retries"


def add_column(apps: Any, editor: Any) -> None:
    connection = editor.connection
    if connection.vendor not in VENDORS:
        return
    with connection.cursor() as cursor:
        columns = connection.introspection.get_table_description(cursor, _TABLE)
    if all(column.name != "errors" for column in columns):
        editor.execute(f"ALTER TABLE {_TABLE} ADD COLUMN errors TEXT")


def drop_column(apps: Any, editor: Any) -> None:
    if editor.connection.vendor in VENDORS:
        editor.execute(f"ALTER TABLE {_TABLE} DROP COLUMN errors")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    dependencies = (("conquiet", "0003_delayed_events"),)
    operations = (migrations.RunPython(add_column, drop_column),)
