"""Texts taken out of payloads: NUL, which many readers refuse, becomes U+FFFD."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f


def text(value: Column) -> Column:
    return f.translate(value, "\0", "\ufffd")
