"""Kombu's broker-neutral suites, from its own source distribution, on our transport.

Basic functionality, exchange types, messages, failover, time-to-live, priorities, and since Kombu
5.7 the event loop and publish batches; each plain and with a key prefix.
"""

from __future__ import annotations

import pytest
from tests.integration.kombu import upstream
from tests.integration.kombu.versions import INSTALLED, OLDEST, known_since, version_of

AT_LEAST = {OLDEST: 80, "5.7.0": 102}
"""How many tests there are since that version: a suite that is not found would pass too."""


def run_suites(directory, version, **settings):
    settings["SUITE_SCHEME"] = "redis-streams"
    outcome = upstream.run(directory, ["t/integration/test_bound.py"], **settings)
    passed = outcome.passed | upstream.passed_alone(directory, outcome, outcome.failed, **settings)
    assert not outcome.skipped
    assert len(passed) >= known_since(AT_LEAST, version)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_test_passes_on_the_installed_version(kombu_tests):
    run_suites(kombu_tests(INSTALLED), INSTALLED, timeout=180)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_test_passes_on_the_oldest_version_that_we_support(kombu_tests, interpreter):
    python = interpreter(f"kombu[redis]=={OLDEST}")
    run_suites(kombu_tests(OLDEST), OLDEST, python=python, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_test_passes_on_the_newest_version(kombu_tests, interpreter):
    python = interpreter("kombu[redis]")
    newest = version_of("kombu", python)
    run_suites(kombu_tests(newest), newest, python=python, timeout=300)
