"""The tables of docs/events.md are what the code says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from marketplace.catalog import CATALOG

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "events.md"


def table() -> str:
    lines = ["| event_type | version | aggregate_type | data |", "|---|---|---|---|"]
    for one in CATALOG.declarations:
        fields = ", ".join(
            field.name + ("" if field.required else "?")
            for field in msgspec.structs.fields(one.data)
        )
        lines.append(f"| `{one.event_type}` | {one.version} | `{one.aggregate_type}` | {fields} |")
    return "\n".join(lines)


def test_the_table_of_events_is_the_catalog() -> None:
    assert table() in DOCUMENT.read_text(), f"docs/events.md should have:\n{table()}"


def test_the_aggregates_of_the_document_are_the_catalog() -> None:
    assert ", ".join(f"`{one}`" for one in CATALOG.aggregate_types) in DOCUMENT.read_text()
