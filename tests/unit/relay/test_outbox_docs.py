"""The tables of docs/outbox.md are those of the code: `python tests/unit/relay/test_outbox_docs.py`
writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conquiet.relay.metrics import METRICS
from conquiet.relay.settings import SETTINGS
from marketplace.catalog import CATALOG

PAGE = Path(__file__).resolve().parents[3] / "docs" / "outbox.md"


def settings_table() -> list[str]:
    lines = [
        "| variable | flag, and name in the file | default | allowed | |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        default = f"`{setting.default}`" if setting.default else "must be given"
        lines.append(
            f"| `{setting.variable}` | `{setting.flag}`, `{setting.name}` | {default}"
            f" | {setting.allowed} | {setting.meaning} |"
        )
    return lines


def metrics_table() -> list[str]:
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return lines


def enums_table() -> list[str]:
    lines = ["| `event_type` | `aggregate_type` | version | `data` |", "|---|---|---|---|"]
    for one in CATALOG.declarations:
        about = f"`{one.aggregate_type}` | {one.version} | `{one.data.__name__}`"
        lines.append(f"| `{one.event_type}` | {about} |")
    used = {one.aggregate_type for one in CATALOG.declarations}
    rest = [f"`{name}`" for name in CATALOG.aggregate_types if name not in used]
    return [*lines, "", f"Aggregates without an event so far: {', '.join(rest) or 'none'}."]


TABLES = {"settings": settings_table, "metrics": metrics_table, "enums": enums_table}


def written_anew(page: str) -> str:
    for name, table in TABLES.items():
        text = "\n".join(table())
        page, count = re.subn(
            rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
            lambda found, text=text: f"{found[1]}{text}\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
        assert count == 1, f"docs/outbox.md has no place for {name}"
    return page


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_the_page_is_that_of_the_code(name) -> None:
    page = PAGE.read_text()
    found = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", page, re.DOTALL)
    assert found[1].splitlines() == TABLES[name](), f"run python {Path(__file__).name}"


def test_the_table_of_events_has_every_value_of_both_enums() -> None:
    text = "\n".join(enums_table())
    for value in (*CATALOG.event_types, *CATALOG.aggregate_types):
        assert f"`{value}`" in text


def test_the_page_covers_what_the_ticket_asks_for() -> None:
    page = PAGE.read_text()
    for heading in (
        "## At least once, in plain words",
        "why FOR UPDATE SKIP LOCKED",
        "## Crash scenarios, and why each is safe",
        "## Consumers: idempotency, and why Redis",
        "## Storage",
        "### The broker is down",
        "### Rows are parked",
        "### Replay",
    ):
        assert heading in page
    assert "consumers must be idempotent" in page


def test_variables_that_the_page_names_exist() -> None:
    known = {setting.variable for setting in SETTINGS} | {"CONQUIET_CONFIG", "CONQUIET_BROKER_URL"}
    assert set(re.findall(r"CONQUIET_[A-Z_]+[A-Z]", PAGE.read_text())) <= known
    endings = re.findall(r"`…(_[A-Z_]+)`", PAGE.read_text())
    assert all(any(name.endswith(ending) for name in known) for ending in endings)


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
