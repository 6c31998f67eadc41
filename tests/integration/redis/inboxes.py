"""Where the inbox of the tests' router remembers a message."""

from __future__ import annotations

INBOX = "conquiet:inbox:{billing}:billing/handler:"


def key(name, source="/test"):
    """The key of the message with that id."""
    return f"{INBOX}{source} {name}"
