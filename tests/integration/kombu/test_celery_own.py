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


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_celerys_own_integration_tests_pass(sdists, tmp_path):
    version = version_of("celery")
    directory = upstream.unpacked(upstream.sdist("celery", version, sdists), tmp_path)
    upstream.put("celery_on_redis.py", directory / "conftest.py")
    upstream.put("registered.py", directory / "sitecustomize.py")
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
