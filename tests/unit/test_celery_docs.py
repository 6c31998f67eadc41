"""The options of docs/celery.md are those of the code: `python tests/unit/test_celery_docs.py`
writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from conquiet.kombu import options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "celery.md"
KINDS = {
    "ours": "of this transport",
    "kept": "as with lists",
    "nothing": "accepted, means nothing here",
    "refused": "refused",
}


def options_table() -> list[str]:
    lines = ["| option | | |", "|---|---|---|"]
    lines += [
        f"| `{option.name}` | {KINDS[option.kind]} | {option.meaning} |" for option in options.TABLE
    ]
    return lines


def rewrite(page: str) -> str:
    text = "\n".join(options_table())
    page, count = re.subn(
        r"(<!-- begin options -->\n).*?(<!-- end options -->)",
        lambda found: f"{found[1]}{text}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )
    assert count == 1, "docs/celery.md has no place for the options"
    return page


def test_the_options_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert rewrite(page) == page, f"run python {Path(__file__).name}"


def test_every_option_of_kombus_redis_transport_has_a_line() -> None:
    from kombu.transport.redis import Channel

    known = {option.name for option in options.TABLE}
    assert set(Channel.from_transport_options) <= known


def test_the_rights_of_the_page_are_those_that_a_test_has_tried() -> None:
    from tests.integration.kombu.test_connections import ALLOWED

    [line] = re.findall(r"ACL SETUSER.*?(?=\n```)", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"\+(\S+)", line)) == set(ALLOWED)


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
