"""`pip install conquiet` brings msgspec and nothing else: an import may need no more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import conquiet
from conquiet.config import MissingExtra

LIST = "import json, sys; print(json.dumps(sorted(set(sys.modules) - before)))"


def imported_by(statement: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; before = set(sys.modules)\n{statement}\n{LIST}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout))


def test_importing_conquiet_needs_msgspec_and_the_standard_library_alone() -> None:
    everything = f"from conquiet import {', '.join(conquiet.__all__)}"
    foreign = {name.partition(".")[0] for name in imported_by(everything)}
    by_msgspec_if_present = {"typing_extensions"}
    expected = {"conquiet", "msgspec"}
    assert foreign - sys.stdlib_module_names - by_msgspec_if_present == expected


def test_sql_without_its_extra_names_the_command_that_installs_it() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import conquiet.sql"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == (
        "conquiet.config.MissingExtra: sqlalchemy is not installed: pip install 'conquiet[sql]'"
    )
    assert issubclass(MissingExtra, ModuleNotFoundError)


def test_the_queue_loads_no_other_part_of_conquiet() -> None:
    loaded = {name for name in imported_by("import conquiet.queue") if name.startswith("conquiet.")}
    assert {name for name in loaded if not name.startswith("conquiet.queue")} == set()


def test_the_public_names_are_there_and_no_others() -> None:
    for name in conquiet.__all__:
        assert getattr(conquiet, name).__name__ == name
    assert set(conquiet.__all__) <= set(dir(conquiet))
    assert not hasattr(conquiet, "Rooter")


def test_the_package_imports_nothing_of_the_reference_application() -> None:
    sources = Path(conquiet.__file__).parent.rglob("*.py")
    found = {
        path.name
        for path in sources
        if re.search(r"^\s*(from|import) marketplace\b", path.read_text(), re.MULTILINE)
    }
    assert found == set()
