"""`conquiet run`, in this process: what it creates, reports and refuses."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conquiet.cli import main
from conquiet.middleware import Metrics

SHOP = """
import os, signal, urllib.request
from dataclasses import dataclass
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from conquiet import App

class Base(DeclarativeBase): ...

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)

@dataclass
class PlaceOrder:
    id: str

@dataclass
class Stop: ...

app = App("shop", database="sqlite{driver}:///shop.db", metadata=Base.metadata)

@app.on
def place_order(order: PlaceOrder, session: Session) -> Stop:
    session.add(Order(id=order.id))
    return Stop()

@app.on
def stop(event: Stop) -> None:
    os.kill(os.getpid(), signal.SIGTERM)

router = app.router
"""


@pytest.fixture(params=["", "+aiosqlite"], ids=["sync", "async"])
def module(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"shop_of_run_{request.param.strip('+')}"
    (tmp_path / f"{name}.py").write_text(SHOP.replace("{driver}", request.param))
    yield name
    imported = sys.modules.pop(name, None)
    if imported is not None:
        imported.app.close()


def place(module: str) -> None:
    imported = __import__(module)
    imported.app.create_tables()
    imported.app.send(imported.PlaceOrder("o-1"))


def test_it_works_until_a_signal_and_reports(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place(module)
    assert main(["run", f"{module}:app", "--create-tables", "--json"]) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "shop: worker on shop started; Ctrl-C stops"
    summary = json.loads("\n".join(rest))
    assert summary["handled"] == 2
    assert (summary["failed"], summary["finished"]) == (0, True)
    with closing(sqlite3.connect("shop.db")) as connection:
        assert connection.execute("SELECT id FROM orders").fetchall() == [("o-1",)]


def test_missing_tables_are_an_error_that_names_the_option(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", f"{module}:app"]) == 2
    error = capsys.readouterr().err
    assert "has no table outbox" in error
    assert "--create-tables" in error


def test_a_target_that_is_no_app_and_options_that_do_not_fit_are_refused(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", f"{module}:router"]) == 2
    assert "it must be an App" in capsys.readouterr().err
    assert main(["worker", "run", f"{module}:app"]) == 2
    assert f"conquiet run {module}:app --only worker" in capsys.readouterr().err
    assert main(["run", f"{module}:app", "--create-tables", "--only", "relay"]) == 2
    assert "no broker to publish to" in capsys.readouterr().err
    if module.endswith("aiosqlite"):
        assert main(["run", f"{module}:app", "--threads", "2"]) == 2
        assert "--concurrency" in capsys.readouterr().err
    assert main(["run", f"{module}:app", "--health", "nowhere"]) == 2
    assert "--health: 'nowhere' is not HOST:PORT or off" in capsys.readouterr().err


def test_probes_are_answered_while_it_runs(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    place(module)
    imported = __import__(module)
    answers: list[int] = []
    pages: list[str] = []
    said: list[str] = []
    imported.app.use(Metrics())

    @imported.app.on(name="probe")
    def probe(order: imported.PlaceOrder) -> None:  # type: ignore[name-defined]
        import re
        import urllib.request

        while not (where := re.search(r"http://\S+:\d+", "".join(said))):  # printed soon
            said.append(capsys.readouterr().err)
        for path in ("/healthz", "/readyz", "/metrics"):
            with urllib.request.urlopen(f"{where[0]}{path}", timeout=5) as response:
                answers.append(response.status)
                pages.append(response.read().decode())

    assert main(["run", f"{module}:app", "--health", "127.0.0.1:0"]) == 0
    assert answers == [200, 200, 200]
    assert "conquiet_messages_in_flight" in pages[-1]
