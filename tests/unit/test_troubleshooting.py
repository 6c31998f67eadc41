"""Each error of docs/troubleshooting.md is provoked, and has the text that the page quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"

APP = """
import sys
from datetime import datetime
import msgspec
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from conquiet import App

class PlaceOrder(msgspec.Struct):
    id: str

app = App("shop", database="sqlite:///shop.db")
"""
CLI = "from conquiet.cli import main\nsys.exit(main({}))"

PROGRAMS = {
    "KeyError: 'No such transport: redis-streams.": (
        "import kombu\nkombu.Connection('redis-streams://localhost').connect()"
    ),
    "sqlalchemy is not installed: pip install 'conquiet[sql]'": (
        "import sys\nsys.modules['sqlalchemy'] = None\nimport conquiet.sql"
    ),
    "has no table outbox, outbox_delayed": f"{APP}\napp.check_tables()",
    "no such table: outbox (conquiet outbox migrate creates the tables)": (
        f"{APP}\napp.send(PlaceOrder('o-1'))"
    ),
    "no provider for the parameter mailer: object": (
        f"{APP}\n@app.on\ndef h(order: PlaceOrder, mailer: object) -> None: ..."
    ),
    "needs a hint of its parameter, as in: def h(order: PlaceOrder)": (
        f"{APP}\n@app.on\ndef h(order): ..."
    ),
    "Session in an async handler would block its event loop": (
        f"{APP}\n@app.on\nasync def h(order: PlaceOrder, session: Session) -> None: ..."
    ),
    "AsyncSession needs an async handler and a database with an async driver": (
        f"{APP}\n@app.on\nasync def h(order: PlaceOrder, session: AsyncSession) -> None: ..."
    ),
    "send() inside a handler would take effect although its transaction may fail": (
        f"{APP}\n@app.on\ndef h(order: PlaceOrder) -> None:\n    app.send(PlaceOrder('o-2'))\n"
        "with app.test() as shop:\n    shop.send(PlaceOrder('o-1'))\n"
        "    raise SystemExit(shop.dead_letters[0].error)"
    ),
    "has no time zone, so it could be any of 26 hours": (
        f"{APP}\napp.create_tables()\napp.send(PlaceOrder('o-1'), at=datetime(2030, 1, 1))"
    ),
    "a queue of SQS has no consumer groups": (
        f"{APP}\nApp('shop', database='sqlite:///shop.db', broker='sqs://eu-central-1/orders')"
    ),
    "PositionInbox would handle an event twice that a producer wrote to the log twice": (
        f"{APP}\nfrom conquiet.sql import LogSource\n"
        "LogSource(app.engine, 'orders', group='billing', exactly_once='position')"
    ),
    "no module named 'nosuch'; run this where the module is, or set PYTHONPATH": (
        "import sys\n" + CLI.format(["run", "nosuch:app"])
    ),
    "CONQUIET_DATABASE_URL is not set": "import sys\n" + CLI.format(["relay", "run"]),
}


def quoted() -> list[str]:
    return re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)


def test_the_page_quotes_the_errors_that_are_provoked_here() -> None:
    assert quoted() == list(PROGRAMS)


@pytest.mark.parametrize("text", list(PROGRAMS))
def test_the_error_has_the_text_of_the_page(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)
    command = [sys.executable, "-c", PROGRAMS[text]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert text in done.stderr.strip().splitlines()[-1]
