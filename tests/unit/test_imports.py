"""`pip install conquiet` brings msgspec and nothing else: an import may need no more."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORT_AND_LIST = """
import json, sys
before = set(sys.modules)
import conquiet
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def imported_with_conquiet() -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, check=True
    )
    return set(json.loads(run.stdout))


def test_importing_conquiet_needs_msgspec_and_the_standard_library_alone() -> None:
    foreign = imported_with_conquiet() - sys.stdlib_module_names
    by_msgspec_if_present = {"typing_extensions"}
    assert foreign - by_msgspec_if_present == {"conquiet", "msgspec"}
