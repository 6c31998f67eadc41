"""Log lines of commands: one line per record, as JSON or for a console.

Line breaks and control characters are escaped and tracebacks indented, so that the content of a
message can neither look like a log line of its own nor control a terminal.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, TextIO

from conquiet.message import STEERING, printable

_EXTRAS = (
    *("event_id", "event_type", "aggregate_type", "aggregate_id", "attempt"),
    *("duplicate", "reason", "topic", "handler", "settings"),
)
"""A record with `is_told` names them in its text, too: a console does not repeat them."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

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
    """Formats a record as time, level, logger and message, with `name=value` of its event."""

    def __init__(self, *, tracebacks: bool = True) -> None:
        super().__init__()
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        told = getattr(record, "is_told", False)
        about = {} if told else {k: v for k, v in _extras(record).items() if k != "settings"}
        pairs = "".join(f" {name}={value}" for name, value in about.items())
        message = printable(f"{record.name}: {record.getMessage()}{pairs}")
        text = f"{moment} {record.levelname:<7} {message}"
        if record.exc_info and self._tracebacks:
            traceback = self.formatException(record.exc_info).splitlines()
            text += "\n" + "\n".join(f"  {printable(line)}" for line in traceback)
        return text


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    found = ((name, getattr(record, name, None)) for name in _EXTRAS)
    return {name: value for name, value in found if value not in (None, "")}


def set_up_logs(
    level: str, form: str = "console", *, tracebacks: bool = True, stream: TextIO | None = None
) -> bool:
    """Log to stderr; return False if the application has set up its logs itself."""
    root = logging.getLogger()
    if root.handlers:
        return False
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        JsonFormatter() if form == "json" else ConsoleFormatter(tracebacks=tracebacks)
    )
    root.addHandler(handler)
    root.setLevel(level.upper())
    if level != "debug":  # it logs each of its plugins
        logging.getLogger("alembic").setLevel(logging.WARNING)
    return True
