"""The table of docs/dashboard.md is that of the code: `python -m tests.web.test_dashboard_docs`
writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from conquiet.web.settings import SETTINGS, TOKEN_VARIABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dashboard.md"
_place = re.compile(r"(<!-- begin settings -->\n).*?(<!-- end settings -->)", re.DOTALL)


def table() -> str:
    lines = ["| variable | flag | default | allowed | |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        default = f"`{setting.default}`" if setting.default else ""
        lines.append(
            f"| `{setting.variable}` | `{setting.flag}` | {default} | {setting.allowed}"
            f" | {setting.meaning} |"
        )
    return "\n".join(lines) + "\n"


def written_anew(page: str) -> str:
    return _place.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    page = PAGE.read_text()
    assert written_anew(page) == page, "run python -m tests.web.test_dashboard_docs"


def test_variables_and_pictures_that_the_page_names_exist() -> None:
    page = PAGE.read_text()
    known = {setting.variable for setting in SETTINGS} | {TOKEN_VARIABLE, "CONQUIET_CONFIG"}
    assert set(re.findall(r"CONQUIET_[A-Z_]+[A-Z]", page)) <= known
    pictures = re.findall(r"\]\((images/[^)]+)\)", page)
    assert len(pictures) == 9
    assert all((PAGE.parent / name).exists() for name in pictures)


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
