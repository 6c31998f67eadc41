"""Create the tables of inbox and outbox by Django's migrations."""

from __future__ import annotations

from typing import Any

from conquiet.django.transaction import VENDORS
from conquiet.sql import schema


def create_tables(apps: Any, editor: Any) -> None:
    """Create missing tables; those of an earlier migration of yours stay as they are."""
    vendor = editor.connection.vendor
    if vendor not in VENDORS:  # another database of the project; an App refuses to use it
        return
    for statement in schema.ddl(vendor).split(";\n"):
        if statement.strip():
            editor.execute(statement)
