"""Kombu's own Redis integration files, unmodified, with the alias `redis` pointed at us.

`not_applicable.toml` lists the tests that look into list keys or PUB/SUB. They run too: a test on
the list that passes, or that Kombu no longer has, does not belong there.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.integration.kombu import upstream
from tests.integration.kombu.versions import INSTALLED, OLDEST, known_since, ordered, version_of

AT_LEAST = {OLDEST: 50, "5.7.0": 83}
"""How many tests pass since that version: a file that is not found would pass too."""

LIST = Path(__file__).with_name("not_applicable.toml")


def not_applicable(version):
    """The ids, of all parameters or of one, of those tests that a version of Kombu has."""
    groups = tomllib.loads(LIST.read_text())["tests"]
    assert all(group["reason"] for group in groups)
    there = [group for group in groups if ordered(group["since"]) <= ordered(version)]
    return {name for group in there for name in group["names"]}


def ids(name):
    """A test is listed by its own id, or with all of its parameters."""
    return {name, name.partition("[")[0]}


def run_files(directory, version, **settings):
    files = sorted((directory / "t" / "integration").glob("test_redis*.py"))
    settings |= {"SUITE_SCHEME": "redis-streams", "SUITE_TAKES_ALIAS": "yes"}
    names = [str(path.relative_to(directory)) for path in files]
    outcome = upstream.run(directory, names, **settings)
    excused = not_applicable(version)
    broken = [name for name in outcome.failed if not ids(name) & excused]
    passed = outcome.passed | upstream.passed_alone(directory, outcome, broken, **settings)
    assert not outcome.skipped
    failing = set().union(*map(ids, outcome.failed))
    assert sorted(excused - failing) == [], "these pass, or are no more: take them from the list"
    assert len(passed) >= known_since(AT_LEAST, version)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_applies_passes_on_the_installed_version(kombu_tests):
    run_files(kombu_tests(INSTALLED), INSTALLED, timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_applies_passes_on_the_oldest_version_that_we_support(kombu_tests, interpreter):
    python = interpreter(f"kombu[redis]=={OLDEST}")
    run_files(kombu_tests(OLDEST), OLDEST, python=python, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_applies_passes_on_the_newest_version(kombu_tests, interpreter):
    python = interpreter("kombu[redis]")
    newest = version_of("kombu", python)
    run_files(kombu_tests(newest), newest, python=python, timeout=300)
