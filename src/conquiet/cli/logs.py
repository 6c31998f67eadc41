"""Logs of the commands: one line per record, whatever a message says."""

from __future__ import annotations

import logging
from typing import Any

from conquiet.message import printable


class LineFormatter(logging.Formatter):
    """Line breaks and control characters are written out, and tracebacks are indented.

    So nothing that a message holds can look like a line of its own, or steer a terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        text = super().formatException(ei)
        return "\n".join(f"  {printable(line)}" for line in text.splitlines())


def set_up_logs(level: int, form: str = "%(levelname)s %(message)s") -> None:
    """Log to stderr, unless the application has set up its logs itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
