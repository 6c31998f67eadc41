"""Events go into the outbox by Django's own connection, in Django's own transaction."""

from typing import Any

import msgspec
from django.db import connection

from conquiet.sql import Outbox

_outbox = Outbox("orders", source="/shop")


class OrderPlaced(msgspec.Struct):
    order: str
    amount: int


def emit(*events: Any) -> None:
    """Store events together with whatever this transaction changes."""
    if not connection.in_atomic_block:
        raise RuntimeError("emit() needs transaction.atomic(), or the event is stored alone")
    connection.ensure_connection()
    with connection.wrap_database_errors:
        _outbox.add(connection.connection, events)
