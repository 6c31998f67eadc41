"""The README's example, pasted into an empty folder, survives kill -9 in the middle."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from conquiet.testing import eventually

ROOT = Path(__file__).parents[2]
COMMANDS = 400

SENDS = f"""
from shop import PlaceOrder, app
for number in range({COMMANDS}):
    for _ in range(1 + number % 10 // 9):  # each tenth comes twice
        app.send(PlaceOrder(f"o-{{number}}", number), id=f"c-{{number}}")
"""


def example() -> str:
    found = re.search(
        r'```python title="shop.py"\n(.*?)```', (ROOT / "README.md").read_text(), re.S
    )
    assert found is not None
    return found[1]


class Shop:
    """The example in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(example())

    def select(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.folder / "shop.db", timeout=30)) as connection:
            return connection.execute(query).fetchall()

    def count(self, query: str) -> int:
        try:
            [(found,)] = self.select(f"SELECT count(*) FROM {query}")
        except sqlite3.OperationalError:  # no such table yet
            return -1
        return int(str(found))

    @contextmanager
    def at_work(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "conquiet", "run", "shop:app", *options]
        child = subprocess.Popen(command, cwd=self.folder, env=self.environment)
        try:
            yield child
        finally:
            child.kill()
            child.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": ""}


@pytest.mark.slow
def test_the_example_of_the_readme_survives_a_kill(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with shop.at_work("--create-tables", "--batch-size", "1"):
        eventually(lambda: shop.count("orders") == 0, timeout=60)
        sender = subprocess.Popen([sys.executable, "-c", SENDS], cwd=tmp_path, env=shop.environment)
        eventually(lambda: shop.count("orders") > 50, timeout=60)
    # Killed. Some commands wait, or are yet to be sent.
    assert sender.wait(60) == 0
    done = shop.count("orders")
    assert 50 < done < COMMANDS
    with shop.at_work() as child:
        eventually(lambda: shop.count("orders") == COMMANDS, timeout=60)
        waiting = "processed_messages WHERE message_id LIKE '/shop c-%'"
        assert shop.count(waiting) == COMMANDS
        child.terminate()
        assert child.wait(60) == 0
    events = shop.select("SELECT data FROM outbox WHERE event_type = 'order.placed'")
    assert len(events) == len(set(events)) == COMMANDS
    assert shop.count("outbox_retries") == 0
