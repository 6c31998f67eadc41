"""Test suites of other projects: fetched at test time, unpacked, run in a pytest of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import needs

ROOT = Path(__file__).resolve().parents[3]
INSIDE = Path(__file__).with_name("inside")

_SETTINGS = """\
[pytest]
python_classes = test_*
markers =
    env: of kombu's suites
    flaky: of kombu's and Celery's suites
    celery: of Celery's suites
"""


@dataclass(frozen=True)
class Outcome:
    """What became of each test, by its id: passed, failed or skipped, and why."""

    passed: frozenset[str]
    failed: dict[str, str]
    skipped: dict[str, str]
    output: str

    def reasons(self, names: Iterable[str]) -> str:
        """Why the named tests failed, for the message of an assertion."""
        return "\n\n".join(f"{name}\n{self.failed[name]}" for name in sorted(names))


def sdist(package: str, version: str, cache: Path) -> Path:
    """The source distribution of a package, downloaded unless the cache has it."""
    archive = cache / f"{package}-{version}.tar.gz"
    if archive.exists():
        return archive
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*download, "--no-binary", ":all:", "--dest", directory, f"{package}=={version}"],
            capture_output=True,
            text=True,
            timeout=110,
        )
        if done.returncode != 0:
            why = done.stderr.strip().splitlines()[-1:]
            needs.missing(f"the source distribution of {package} {version}", *why or ["offline"])
        [found] = Path(directory).iterdir()
        os.replace(found, archive)
    return archive


def unpacked(archive: Path, into: Path) -> Path:
    """The directory with the tests `t/` alone: the package beside them would be imported first."""
    with tarfile.open(archive) as files:
        top = files.getnames()[0].split("/")[0]
        tests = [one for one in files.getmembers() if one.name.startswith(f"{top}/t/")]
        files.extractall(into, members=tests, filter="data")
    (into / top / "pytest.ini").write_text(_SETTINGS)
    return into / top


def put(name: str, where: Path) -> None:
    """Copy a file of ours into an unpacked suite: under its own name, it would be run here."""
    shutil.copy(INSIDE / name, where)


def run(
    directory: Path,
    tests: list[str],
    *options: str,
    python: str = sys.executable,
    workers: int = 8,
    timeout: float = 110,
    **environment: str,
) -> Outcome:
    """Run tests of an unpacked suite; they wait more than they compute, hence the workers."""
    report = directory / "report.xml"
    paths = {
        # The suite's directory first: a sitecustomize there reaches the processes that it starts.
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT / "src")]),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run(
        [*command, "--timeout=60", f"--junitxml={report}", *options, *tests],
        cwd=directory,
        env={**os.environ, **paths, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    ran = done.returncode in (0, 1) and "errors during collection" not in done.stdout
    assert ran, done.stdout[-5000:]
    return _outcome(report, done.stdout)


def passed_alone(
    directory: Path, outcome: Outcome, failed: Iterable[str], *options: str, **settings: Any
) -> frozenset[str]:
    """Run what failed once more, one at a time: these suites wait for fixed times."""
    if not (names := sorted(failed)):
        return frozenset()
    settings["workers"] = 1
    again = run(directory, [f"t/integration/{name}" for name in names], *options, **settings)
    assert not again.failed, f"{outcome.reasons(names)}\n\nalone:\n\n{again.reasons(again.failed)}"
    return again.passed


def _outcome(report: Path, output: str) -> Outcome:
    passed: set[str] = set()
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = _node_id(case.get("classname", ""), case.get("name", ""))
        trouble = [one for one in case if one.tag in ("failure", "error")]
        excuse = case.find("skipped")
        if trouble:
            failed[name] = "\n".join(one.text or one.get("message", "") for one in trouble)
        elif excuse is not None:
            skipped[name] = excuse.get("message", "")
        else:
            passed.add(name)
    return Outcome(frozenset(passed - failed.keys()), failed, skipped, output)


def _node_id(classname: str, name: str) -> str:
    """`test_redis.py::test_RedisMessage::test_x[a]`, as a list of tests is best written."""
    if not classname:  # a whole module that is skipped
        return f"{name.rpartition('.')[2]}.py"
    parts = classname.split(".")
    module = parts.index("integration") + 1
    return "::".join([f"{parts[module]}.py", *parts[module + 1 :], name])
