"""Fields of log lines: which event a line is about."""

from __future__ import annotations

from typing import Any

from conquiet.message import Message


def fields(message: Message[Any], **more: Any) -> dict[str, Any]:
    """Return the `extra=` of a log line about an event."""
    attributes = message.attributes
    return {
        "event_id": attributes.get("id", ""),
        "event_type": attributes.get("type", ""),
        "aggregate_type": _either(attributes, "aggregate_type", "aggregatetype"),
        "aggregate_id": _either(attributes, "aggregate_id", "aggregateid", "subject"),
        "attempt": message.deliveries,
        **more,
    }


def _either(attributes: dict[str, Any], *names: str) -> str:
    return next((str(attributes[name]) for name in names if attributes.get(name)), "")
