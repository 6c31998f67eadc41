"""The password of a server is in no error, plan, progress, checkpoint, page of the UI or log."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from traceback import format_exception

import pytest
from tests.spark.outbox.rows import fill

from conquiet.errors import ConquietError
from conquiet.spark.outbox.source import OutboxSource
from conquiet.spark.upsert.sink import UpsertSink
from conquiet.sql import engine as make_engine
from conquiet.sql import schema

SECRET = "pa55word"
BROKEN = {
    "nobody listens": f"postgresql://app:{SECRET}@127.0.0.1:1/shop",
    "no such option": f"postgresql://app:{SECRET}@127.0.0.1:1/shop?conect_timeout=1",
    "no number": f"postgresql://app:{SECRET}@127.0.0.1:port/shop",
    "in place of a port": f"postgresql://app:{SECRET}/shop",
    "an @ in it": f"postgresql://app:x@{SECRET}@127.0.0.1:1/shop",
    "a slash in it": f"postgresql://app:{SECRET}/x@127.0.0.1:1/shop",
    "another database": f"mysql://app:{SECRET}@127.0.0.1/shop",
}


def with_secret(url: str) -> str:
    """A password that the server, which trusts this host, does not ask for."""
    return url.replace("postgres@", f"postgres:{SECRET}@")


def outbox(url: str):
    source = OutboxSource({"url": url})
    return source.reader(source.schema())


@pytest.mark.parametrize("url", BROKEN.values(), ids=BROKEN)
def test_no_error_shows_a_password(url: str) -> None:
    from pyspark.sql.types import StructType

    attempts = [
        lambda: outbox(url).partitions(),
        lambda: UpsertSink({"url": url, "table": "t", "keys": "id"}).writer(
            StructType().add("id", "integer"), False
        ),
    ]
    for attempt in attempts:
        with pytest.raises(ConquietError) as raised:
            attempt()
        assert SECRET not in str(raised.value)
        assert SECRET not in repr(raised.value)


def test_a_task_that_finds_the_database_gone_shows_no_password(database_url: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine)
    fill(engine, range(3))
    engine.dispose()
    reader = outbox(with_secret(database_url))
    [part] = reader.partitions()
    address = reader.options.address
    assert SECRET not in repr(reader.options)
    object.__setattr__(address, "url", BROKEN["nobody listens"])
    with pytest.raises(ConquietError) as raised:
        list(reader.read(part))
    assert SECRET not in "".join(format_exception(raised.value))


def test_with_a_variable_no_secret_travels(monkeypatch, database_url: str) -> None:
    monkeypatch.setenv("SHOP_DATABASE", with_secret(database_url))
    source = OutboxSource({"urlEnv": "SHOP_DATABASE"})
    assert SECRET.encode() not in pickle.dumps(source.reader(source.schema()))


@pytest.mark.slow
def test_no_secret_is_in_plan_progress_or_checkpoint(
    spark, database_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = with_secret(database_url)
    engine = make_engine(database_url)
    schema.init(engine)
    fill(engine, range(3))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE copies (event_id text PRIMARY KEY)")
    spark.read.format("conquiet-outbox").option("url", url).load().explain(mode="extended")
    events = spark.readStream.format("conquiet-outbox").option("url", url).load()
    writing = events.select("event_id").writeStream.format("conquiet-upsert")
    writing.options(url=url, table="copies", keys="event_id")
    writing.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    query = writing.start()
    query.awaitTermination()
    query.explain(extended=True)
    shown = [capfd.readouterr().out, *(progress.json for progress in query.recentProgress)]
    shown += [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM copies").scalar_one() == 3
    assert len(shown) > 4
    assert not [text for text in shown if SECRET in text]
    engine.dispose()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_secret_is_in_the_user_interface_or_in_the_log_of_spark(
    redis_client, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    for number in range(3):
        fields = {"id": f"e-{number}", "type": "sold", "source": "/shop", "specversion": "1.0"}
        redis_client.xadd("orders", {**fields, "data": "{}"})
    engine = make_engine(database_url)
    schema.init(engine)
    fill(engine, range(3))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE copies (event_id text PRIMARY KEY)")
    # A user without a password, as that of the tests, may give any.
    redis_secret = redis_url.replace("redis://", f"redis://default:{SECRET}@")
    urls = [redis_secret, with_secret(database_url), BROKEN["nobody listens"]]
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.secrets_job", *urls, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["read"] == 3
    assert redis_client.xlen("copies") == 3
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM copies").scalar_one() == 3
    engine.dispose()
    pages = json.loads((tmp_path / "pages.json").read_text())
    texts = {"stdout": done.stdout, "stderr": done.stderr} | pages
    texts |= {one.name: one.read_text() for one in tmp_path.glob("error-*")}
    # What a reader of these pages is after is there: settings, plans, queries, errors.
    everything = "\n".join(pages.values())
    for shown in ("spark.ui.killEnabled", "conquiet-outbox", "StreamingQuery", "SQL/execution"):
        assert shown in everything
    assert "INFO" in done.stderr
    assert len([name for name in texts if name.startswith("error-")]) == 2
    assert [name for name, text in texts.items() if SECRET in text] == []
