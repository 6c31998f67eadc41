"""The seed's first page: the queue is fully independent."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import conquiet.queue
from conquiet.queue import MalformedEntryError

NO_REDIS = """
import sys
sys.modules["redis"] = None
try:
    import conquiet.queue
except ImportError as error:
    print(error)
"""


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize(
    "path", sorted(Path(conquiet.queue.__file__).parent.glob("*.py")), ids=lambda path: path.name
)
def test_it_imports_no_other_part_of_conquiet(path):
    parts = [name for name in imported(path) if name.startswith((".", "conquiet"))]
    assert [name for name in parts if not name.startswith("conquiet.queue.")] == []


def test_without_redis_py_the_import_names_the_extra():
    command = [sys.executable, "-c", NO_REDIS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "conquiet.queue needs redis-py: pip install 'conquiet[redis]'"


def test_a_malformed_entry_error_survives_pickling():
    error = pickle.loads(pickle.dumps(MalformedEntryError("orders", "1-0", "no field")))
    assert (error.stream, error.entry_id, error.reason) == ("orders", "1-0", "no field")
    assert str(error).startswith("entry 1-0 of stream 'orders' is not a message: no field")
