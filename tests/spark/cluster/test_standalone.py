"""On a real cluster, of which a part dies in the middle: the results are exact all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import needs
from tests.spark.cluster.standalone import Cluster, Job
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.spark.router.shop import create_tables, outbox_size, sales
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture
def two_workers(cluster: Cluster) -> Cluster:
    """The cluster, with as many workers as a test before this one may have killed."""
    while len(cluster.alive()) < 2:
        cluster.add_worker()
    return cluster


def test_a_batch_is_written_once_though_a_worker_is_killed(
    two_workers, tmp_path, redis_client, redis_url
) -> None:
    rows = 400_000
    with Job(two_workers, tmp_path, "write_batch", url=redis_url, rows=rows) as job:
        eventually(lambda: redis_client.xlen("orders") > rows // 20, timeout=240)
        two_workers.alive()[0].kill()
        assert redis_client.xlen("orders") < rows
        assert job.result() == rows
    ids = {fields[b"id"] for _, fields in redis_client.xrange("orders")}
    assert len(ids) == rows == redis_client.xlen("orders")


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param({}, id="python-worker-in-the-handler"),
        pytest.param({"dies_after_commit": True}, id="python-worker-after-the-commit"),
        pytest.param({"ends_executor": True}, id="executor"),
    ],
)
def test_effects_happen_once_when_spark_retries_a_task(
    two_workers, tmp_path: Path, database_url, behaviour
) -> None:
    engine = create_tables(database_url)
    job = Job(
        two_workers, tmp_path, "route",
        url=database_url, notes=tmp_path, rows=ROWS, dies_at=130, **behaviour,
    )  # fmt: skip
    counted = job.result()
    assert (tmp_path / "died").exists()
    assert sum(counted.values()) == ROWS
    assert sales(engine) == list(range(ROWS))
    assert outbox_size(engine) == ROWS
