"""A lake in an S3 store: moto's server, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.lake.payments import entries, pipeline
from tests.unit.lake.test_engine import contents

from conquiet.errors import ConfigError
from conquiet.lake.journal import Lease, LeaseLost
from conquiet.lake.pipeline import as_table
from conquiet.lake.tables import Files

BUCKET = "conquiet-tests"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    boto3 = pytest.importorskip("boto3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        url = f"http://127.0.0.1:{port}"
        access = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **access)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield url
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("moto's server did not start")


@pytest.fixture
def lake(endpoint, monkeypatch, request):
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    pipeline.lake = f"s3://{BUCKET}/{request.node.name}"
    return pipeline


def test_tables_are_those_of_a_lake_on_a_disk(lake, tmp_path):
    log = entries(12)
    for start in range(0, len(log), 12):
        lake.run(as_table(log[start : start + 12]))
    found = contents(lake)
    lake.lake = str(tmp_path / "lake")
    lake.run(as_table(log))
    assert found == contents(lake)


def test_a_bucket_that_is_not_there_is_an_error_in_one_line(lake):
    lake.lake = "s3://no-such-bucket/lake"
    with pytest.raises(
        ConfigError, match=r"no-such-bucket/lake cannot be used: .*NoSuchBucket"
    ) as e:
        lake.run(as_table(entries(1)))
    assert not {"\n", "\x1b"} & set(str(e.value))


@pytest.mark.slow
def test_upkeep_and_retry(lake):
    log = entries(6)
    lake.run(as_table(log[:6]))
    lake.run(as_table(log[6:]))
    before = contents(lake)
    lake.optimize(hours=0)
    assert contents(lake) == before
    assert lake.quarantine.retry() == 0


def test_a_second_driver_is_refused_while_the_first_keeps_its_lease(lake):
    with lake.driver(), pytest.raises(ConfigError, match="in use by another driver"):
        lake.refresh()
    assert lake.refresh() == 0


def test_of_two_drivers_that_take_the_lease_at_once_one_is_refused(lake, monkeypatch):
    """Both have seen that no driver has the lease before either takes it."""
    files = Files(lake.lake)
    with lake.driver():
        pass
    both_have_looked = threading.Barrier(2)
    look = Lease._table

    def look_together(lease):
        table = look(lease)
        both_have_looked.wait(timeout=30)
        return table

    monkeypatch.setattr(Lease, "_table", look_together)
    leases = [Lease(files), Lease(files)]

    def take(lease: Lease) -> str:
        try:
            lease.acquire()
        except ConfigError as error:
            return str(error)
        return "taken"

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(take, leases), key=len)
    assert said[0] == "taken"
    assert "was taken by another driver at this moment" in said[1]
    monkeypatch.undo()
    for one in leases:
        one.release()


def test_a_driver_that_lost_its_lease_stops_before_the_next_step(lake):
    log = entries(2)
    with lake.driver() as driver:
        driver.take(as_table(log[:1]), "rows", 0)
        driver._lock._until = time.time() - 1  # no renewal has reached the store
        with pytest.raises(LeaseLost, match="has ended"):
            driver.take(as_table(log[1:]), "rows", 1)
    assert lake.read("events").num_rows == 1


@pytest.mark.slow
def test_readers_see_whole_commits_while_batches_come_in(lake):
    log = [one for one in entries(12) if one["type"] == "payment_authorized"]
    lake.run(as_table(log[:1]))
    stop = threading.Event()
    faults: list[str] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            rows = lake.read("payment").to_pylist()
            ids = [row["payment_id"] for row in rows]
            reads += 1
            if not ids or len(ids) != len(set(ids)):
                faults.append(f"{ids}")

    reader = threading.Thread(target=read)
    reader.start()
    for one in log[1:5]:
        lake.run(as_table([one]))
    stop.set()
    reader.join()
    assert not faults
    assert reads > 0


def test_the_checkpoint_of_a_stream_must_be_named(lake):
    with pytest.raises(ConfigError, match="checkpoint="):
        lake._checkpoint(Files(lake.lake))
    assert os.environ["AWS_ENDPOINT_URL"].startswith("http://")
