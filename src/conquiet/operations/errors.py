"""Errors that an operator meets."""

from __future__ import annotations

from conquiet.errors import ConquietError


class NotFound(ConquietError):
    """What was asked for is not there: a stream, a group, an entry, a letter, an event."""
