"""Celery's own integration tests, from its source distribution, with our transport as the broker.

They start a prefork worker, and need no other service than Redis. `celery_not_here.toml` lists with
reasons the tests that need more than that, or that do not concern the transport.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.integration.kombu import upstream
from tests.integration.kombu.versions import known_since, version_of

AT_LEAST = {"5.7.0": 388}
LIST = Path(__file__).with_name("celery_not_here.toml")


OPTIONS = ("-p", "celery.contrib.pytest", "--timeout=300")


@pytest.fixture
def directory(sdists, tmp_path):
    """Unpack the tests of the installed Celery."""
    found = upstream.unpacked(upstream.sdist("celery", version_of("celery"), sdists), tmp_path)
    upstream.put("celery_on_redis.py", found / "conftest.py")
    upstream.put("registered.py", found / "sitecustomize.py")
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_celerys_own_tests_of_half_open_connections_pass(directory):
    names = ["t/integration/test_connection_recovery.py"]
    alias = {"SUITE_SCHEME": "redis", "SUITE_TAKES_ALIAS": "yes"}
    outcome = upstream.run(directory, names, *OPTIONS, workers=2, timeout=200, **alias)
    assert not outcome.failed, outcome.reasons(outcome.failed)
    assert (len(outcome.passed), outcome.skipped) == (2, {})


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_celerys_own_integration_tests_pass(directory):
    version = version_of("celery")
    outcome = upstream.run(
        directory,
        ["t/integration"],
        *OPTIONS,
        SUITE_SCHEME="redis-streams",
        workers=3,
        timeout=2000,
    )
    excused = {
        name for group in tomllib.loads(LIST.read_text())["tests"] for name in group["names"]
    }
    ran = {name.partition("[")[0] for name in (*outcome.passed, *outcome.failed, *outcome.skipped)}
    assert sorted(excused - ran) == [], "these are no more: take them from the list"
    broken = [name for name in outcome.failed if name.partition("[")[0] not in excused]
    passed = outcome.passed | upstream.passed_alone(
        directory, outcome, broken, *OPTIONS, SUITE_SCHEME="redis-streams", timeout=600
    )
    assert len(passed) >= known_since(AT_LEAST, version)
