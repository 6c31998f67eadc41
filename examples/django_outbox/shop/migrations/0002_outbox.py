"""The table of conquiet, so that Django's test databases have it too."""

from typing import Any

from django.db import migrations

from conquiet.sql import schema


def create_outbox(apps: Any, editor: Any) -> None:
    for statement in schema.ddl(editor.connection.vendor, inbox=None).split(";\n"):
        if statement.strip():
            editor.execute(statement)


class Migration(migrations.Migration):  # type: ignore[misc]
    dependencies = (("shop", "0001_initial"),)
    operations = (migrations.RunPython(create_outbox, migrations.RunPython.noop),)
