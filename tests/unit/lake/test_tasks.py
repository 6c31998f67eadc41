"""Definitions reach other processes: structs that cannot be imported there travel by value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

READ = """
import pickle, sys
from datetime import UTC, datetime
definition = pickle.loads(open(sys.argv[1], "rb").read())
from conquiet.lake.judge import Judge
Judge(definition)
first, second = (definition.structs["payment_authorized", one] for one in (1, 2))
assert issubclass(second, first)
assert second("p", "shop", 1, "USD").currency == "USD"
at = datetime(2026, 3, 1, tzinfo=UTC)
state = definition.facts["payment_state"].state(key="p", shop="shop", authorized_at=at)
[row] = state.rows()
assert type(row) is definition.tables["payment"].row, row
print(row.shop)
"""


def test_definitions_of_a_script(tmp_path):
    pytest.importorskip("pyspark")
    payments = Path(__file__).with_name("payments.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(
        payments
        + "\nif __name__ == '__main__':\n"
        + "    import sys\n    from conquiet.lake.tasks import dump_definition\n"
        + "    open(sys.argv[1], 'wb').write(dump_definition(pipeline.definition))\n"
    )
    dumped = str(tmp_path / "definition")
    subprocess.run([sys.executable, str(script), dumped], check=True, cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ, dumped], check=True, capture_output=True, text=True
    )
    assert done.stdout == "shop\n"
