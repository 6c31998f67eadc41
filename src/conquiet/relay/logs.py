"""Logs of the relay: which event a line is about, as JSON or for a console."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

from conquiet.message import STEERING, Message, printable

_NAMES = ("event_id", "event_type", "aggregate_type", "aggregate_id", "attempt")
_EXTRAS = (*_NAMES, "duplicate", "reason", "topic", "settings")


def fields(message: Message[Any], **more: Any) -> dict[str, Any]:
    """What a line about an event carries, for `extra=`."""
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


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    found = ((name, getattr(record, name, None)) for name in _EXTRAS)
    return {name: value for name, value in found if value not in (None, "")}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat()
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class ConsoleFormatter(logging.Formatter):
    """Time, level, what happened, and `name=value` of what it happened to."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        about = {name: value for name, value in _extras(record).items() if name != "settings"}
        told = "".join(f" {name}={value}" for name, value in about.items())
        text = f"{moment} {record.levelname:<7} {printable(record.getMessage() + told)}"
        if record.exc_info:
            text += "\n" + indented(self.formatException(record.exc_info))
        return text


def indented(traceback: str) -> str:
    """What an error says may look like a line of the log; indented, it is seen to be none."""
    return "\n".join(f"  {printable(line)}" for line in traceback.splitlines())


def set_up(form: str, level: str, stream: TextIO | None = None) -> None:
    """Log to stderr, unless the application has set up its logs itself."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
