"""On a real cluster, of which a part dies in the middle: the results are exact all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import needs
from tests.spark.cluster.standalone import JOB_SECONDS, Cluster, Job
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.spark.router.redis_shop import OUTBOX, SALES
from tests.spark.router.shop import create_tables, outbox_size, sales
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

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
        eventually(lambda: redis_client.xlen("orders") > rows // 20, timeout=JOB_SECONDS)
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


def test_effects_in_redis_happen_once_when_spark_retries_a_task(
    two_workers, tmp_path: Path, redis_client, redis_url
) -> None:
    given = {"url": redis_url, "notes": tmp_path, "rows": ROWS, "dies_at": 130}
    counted = Job(two_workers, tmp_path, "route_in_redis", **given).result()
    assert (tmp_path / "died").exists()
    assert counted["skipped"] >= 20  # those of the slice that was committed
    assert sum(counted.values()) == ROWS
    assert sorted(map(int, redis_client.lrange(SALES, 0, -1))) == list(range(ROWS))
    assert redis_client.xlen(OUTBOX) == ROWS


@pytest.mark.parametrize("ends_executor", [False, True], ids=["python-worker", "executor"])
def test_effects_of_a_stream_happen_once_though_a_part_of_the_cluster_is_killed(
    two_workers, tmp_path: Path, database_url, redis_client, redis_url, ends_executor
) -> None:
    engine = create_tables(database_url)
    publish_orders(redis_client, ROWS)
    given = {"url": database_url, "log": redis_url, "notes": tmp_path, "dies_at": 130}
    job = Job(two_workers, tmp_path, "route_log", ends_executor=ends_executor, **given)
    counted = job.result()
    assert (tmp_path / "died").exists()
    assert sum(counted.values()) == ROWS
    assert sales(engine) == list(range(ROWS))
    assert outbox_size(engine) == ROWS


def test_effects_happen_once_when_spark_runs_a_slow_task_twice(
    two_workers, tmp_path: Path, database_url
) -> None:
    engine = create_tables(database_url)
    job = Job(two_workers, tmp_path, "route_twice", url=database_url, notes=tmp_path, rows=ROWS)
    counted = job.result()
    assert (tmp_path / "second").exists()  # both attempts were at the same order, at once
    assert sum(counted.values()) == ROWS
    assert sales(engine) == list(range(ROWS))
    assert outbox_size(engine) == ROWS


def test_source_router_and_sink_work_in_processes_that_spark_makes(
    tmp_path: Path, database_url, redis_client, redis_url
) -> None:
    """`local-cluster`: executors of their own, without a cluster to be started."""
    engine = create_tables(database_url)
    publish_orders(redis_client, ROWS)
    given = {"url": database_url, "log": redis_url, "notes": tmp_path}
    assert Job(None, tmp_path, "through", **given).result() == {"handled": ROWS}
    assert sales(engine) == list(range(ROWS))
    copied = [fields[b"id"].decode() for _, fields in redis_client.xrange("copy")]
    assert sorted(copied) == sorted(f"e-{number}" for number in range(ROWS))


def publish_orders(client, rows: int) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(rows):
        fields = {"id": f"e-{number}", "type": "sell", "source": "/web", "specversion": "1.0"}
        pipeline.xadd("orders", {**fields, "data": f'{{"id": {number}}}'})
    pipeline.execute()
