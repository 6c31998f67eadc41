"""Advice: what to do about an error of a store."""

from __future__ import annotations


def advice(why: str) -> str:
    """One sentence, by what the error says."""
    text = why.lower()
    if "no such table" in text or "does not exist" in text or "no file" in text:
        return "Make the tables with: conquiet outbox migrate"
    if "password" in text or "auth" in text or "wrongpass" in text:
        return "Check user and password in the URL that the dashboard was started with."
    if "timeout" in text or "canceling statement" in text:
        return "It is slow or busy. Narrow the search, or try again in a while."
    return "Is it running, and can this machine reach it? conquiet doctor tells."
