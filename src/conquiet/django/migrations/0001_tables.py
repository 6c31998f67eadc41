"""Create inbox, outbox and the tables of its groups, as `conquiet.sql.schema` defines them."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from conquiet.django.migrations import create_tables
from conquiet.sql import schema


def drop_tables(apps: Any, editor: Any) -> None:
    for table in (
        f"{schema.OUTBOX_TABLE}_retries",
        f"{schema.OUTBOX_TABLE}_positions",
        schema.OUTBOX_TABLE,
        schema.INBOX_TABLE,
    ):
        editor.execute(f"DROP TABLE IF EXISTS {table}")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    initial = True
    dependencies = ()
    operations = (
        migrations.RunPython(create_tables, drop_tables),
        # For the admin; Django does not compare the fields of unmanaged models.
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
            options={"verbose_name": "outbox event", "db_table": "outbox", "managed": False},
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[("id", models.BigIntegerField(primary_key=True, serialize=False))],
            options={"verbose_name": "dead letter", "db_table": "outbox_retries", "managed": False},
        ),
    )
