"""`conquiet pipeline`: what is refused before Spark starts, and the archive for executors."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pyarrow.parquet
import pytest

from conquiet import spark
from conquiet.cli import build_parser, main
from conquiet.cli.pipeline_run import (
    BatchProgress,
    last_words,
    serve_metrics,
    source_options,
    spark_settings,
)
from conquiet.errors import ConfigError
from conquiet.spark.archive import first_python, list_needed, this_python

START = ("--option", "startingOffsets=5-1")
END = ("--option", "endingOffsets=9-9")
LATEST = ("--starting", "latest")
LOG = ("--broker", "redis://h")
REMOTE = ("--remote", "sc://h")
WHOLE = ("--from", "outbox", "--database", "u")
HEAVY = ("pyarrow", "pandas", "numpy", "deltalake", "sqlalchemy", "psycopg-binary")


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONQUIET_BROKER_URL", raising=False)
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "s"], "CONQUIET_BROKER_URL"),
        (["--from", "outbox"], "CONQUIET_DATABASE_URL"),
        ([*LOG], "--streams 'orders,payments:*'"),
        ([*LOG, "--streams", "s", "--table", "t"], "--table is for --from outbox"),
        ([*WHOLE, "--streams", "s"], "--streams is for"),
        ([*LOG, "--streams", "s", "--archive", "none.zip"], "pipeline package"),
        ([*LOG, "--streams", "s", "--once", "--trigger-seconds", "1"], "exclude each"),
        ([*LOG, "--streams", "s", "--option", "maxOffsetPerTrigger=1"], "did you mean"),
        ([*LOG, "--streams", "s", "--starting", "yesterday"], "a time (2026-01-31T12"),
        ([*WHOLE, "--option", "until=never"], "until"),
        ([*WHOLE, "--table", "outbox_events"], "add --once"),
        ([*WHOLE, "--table", "app.outbox_events", "--once", "--max-events", "5"], "no positions"),
        ([*WHOLE, "--table", "outbox_events", "--once", *START], "has no positions"),
        ([*WHOLE, "--option", "table=outbox_events", "--once", *LATEST], "has no positions"),
        ([*WHOLE, "--option", "Table=outbox_events", "--once", *END], "has no positions"),
        ([*LOG, "--streams", "s", *REMOTE], "add --once, or use --master"),
        ([*LOG, "--streams", "s", *REMOTE, "--once", "--master", "m"], "--master is the server's"),
        ([*LOG, "--streams", "s", *REMOTE, "--once", "--max-events", "5"], "read as a whole"),
        (["--from", "files", "--path", "p", *REMOTE, "--once"], "--from log and --from outbox"),
        (["--from", "files"], "where are the files? --path"),
        (["--from", "files", "--path", "log", "--max-events", "5"], "maxFilesPerTrigger=1"),
        (["--from", "files", "--path", "nowhere"], "nowhere: there is no such folder"),
        (["marketplace.lake:CATALOG", *LOG, "--streams", "s"], "not a conquiet.lake.Pipeline"),
        (["marketplace.lake:nothing", *LOG, "--streams", "s"], "has no 'nothing'"),
    ],
)
def test_what_cannot_work_is_told_before_spark_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["pipeline", "run", "--to", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--conf", "nothing"], ["--max-events", "0"], ["--from", "kafka"], ["--metrics", "9100"]],
)
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["pipeline", "run", *arguments])
    assert stopped.value.code == 2


def parsed(*arguments: str):
    return build_parser().parse_args(["pipeline", "run", "--to", "lake", *arguments])


def test_options_of_the_source_come_from_the_command_line() -> None:
    options = parsed(
        *("--broker", "redis://h", "--streams", "a,b", "--max-events", "10"),
        *("--option", "readerName=lake", "--starting", "latest"),
    )
    assert source_options(options) == {
        "url": "redis://h",
        "streams": "a,b",
        "startingOffsets": "latest",
        "maxOffsetsPerTrigger": "10",
        "readerName": "lake",
    }


def test_the_address_may_stand_in_a_file_where_no_list_of_processes_shows_it(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_BROKER_URL", "redis://elsewhere")
    options = parsed("--streams", "a", "--option", "urlFile=/run/redis-url")
    assert source_options(options) == {
        "urlFile": "/run/redis-url",
        "streams": "a",
        "startingOffsets": "earliest",
    }
    both = parsed("--broker", "redis://h", "--streams", "a", "--option", "urlFile=x")
    with pytest.raises(ConfigError, match="not both"):
        source_options(both)


def test_a_table_without_positions_is_asked_for_none() -> None:
    options = parsed(*WHOLE, "--table", "public.outbox_events", "--once")
    assert source_options(options) == {"url": "u", "table": "public.outbox_events"}


def batch(number: int, rows: int, start: str, end: str) -> SimpleNamespace:
    """The progress of a query over one stream."""
    places = {name: json.dumps({"orders": at}) for name, at in (("start", start), ("end", end))}
    source = SimpleNamespace(
        startOffset=places["start"], endOffset=places["end"], latestOffset=None
    )
    return SimpleNamespace(
        batchId=number, numInputRows=rows, sources=[source], processedRowsPerSecond=1.0
    )


def test_what_a_run_has_missed_is_told_and_not_what_was_missed_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = BatchProgress(as_json=False)
    batches = [batch(4, 2, "5-0@7!1:6", "9-0@9!1:6"), batch(5, 3, "9-0@9!1:6", "12-0@12!1:6")]
    progress.look(SimpleNamespace(recentProgress=batches))
    progress.end("lake", stopped=False)
    assert "lost" not in capsys.readouterr().err
    batches.append(batch(6, 0, "12-0@12!1:6", "12-0@12!2:6~"))  # of a size that nobody knows
    progress.look(SimpleNamespace(recentProgress=batches))
    assert progress.lost == (1, 0)
    progress.end("lake", stopped=False)
    assert "0 or more events lost (losses: 1)" in capsys.readouterr().err


def test_steps_are_printed_for_people_and_not_between_lines_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.cli.pipeline_run._LINE_SECONDS", 0.0)
    done = SimpleNamespace(step="store_daily committed", events=7)
    BatchProgress(as_json=False).say(done)
    assert capsys.readouterr() == ("", "store_daily committed\n")
    BatchProgress(as_json=True).say(done)
    assert capsys.readouterr() == ("", "")


def test_batches_that_no_query_counts_are_counted_by_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = BatchProgress(as_json=True, by_steps=True)
    for step, events, seconds in (
        ("taken", 30, 2.0),
        ("events committed", 30, 3.0),
        ("taken", 50, 4.0),
    ):
        progress.say(SimpleNamespace(step=step, events=events, seconds=seconds))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(one["batch"], one["events"], one["events_per_second"]) for one in lines]
    assert found == [(0, 30, 15.0), (1, 20, 10.0)]
    assert (progress.events, progress.batches) == (50, 2)


def test_metrics_answer_while_a_run_goes_on(tmp_path: Path) -> None:
    from tests.unit.lake.payments import entries, pipeline

    def scrape(port: int) -> str:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.read().decode()

    pipeline.lake = str(tmp_path / "lake")
    with serve_metrics(pipeline, "127.0.0.1", 0) as port:
        assert "conquiet_lake_broken{" not in scrape(port)  # no lake yet
        pipeline.take(entries(16))
        text = scrape(port)
        assert 'conquiet_lake_broken{pipeline="payments",rule="captures_something"} 2.0' in text
        assert 'conquiet_lake_checked{pipeline="payments",rule="captures_something"} 18.0' in text
        reason = 'conquiet_lake_quarantined_events{pipeline="payments",reason="captures_something"}'
        assert f"{reason} 2.0" in text
        pipeline.refresh()
        lag = 'conquiet_lake_delivery_lag_seconds{pipeline="payments",quantile="0.5"} 1.0'
        assert lag in scrape(port)
        with (
            pytest.raises(ConfigError, match="cannot be used"),
            serve_metrics(pipeline, "127.0.0.1", port),
        ):
            pass


def test_files_that_hold_no_log_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, lake = tmp_path / "log", tmp_path / "lake"
    command = ["pipeline", "run", "--from", "files", "--path", str(log), "--to", str(lake)]
    log.mkdir()
    (log / "part-0.parquet").write_text("PAR1 and nothing else")
    assert main(command) == 2
    assert "part-0.parquet is not a whole Parquet file" in capsys.readouterr().err
    pyarrow.parquet.write_table(pyarrow.table({"stream": ["a"]}), log / "part-0.parquet")
    assert main(command) == 2
    assert "part-0.parquet has no column entry_id" in capsys.readouterr().err
    assert not lake.exists()


def test_an_archive_comes_with_the_settings_that_unpack_it(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    archive.touch()
    found = spark_settings(parsed("--archive", str(archive), "--conf", "a.b=c=d"), debug=True)
    assert found == {
        "a.b": "c=d",
        "spark.archives": f"{archive}#conquiet",
        "spark.executorEnv.PYTHONPATH": "./conquiet",
    }


@pytest.mark.slow
def test_the_archive_holds_conquiet_what_it_needs_and_what_is_yours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text("x = 1\n")
    target = tmp_path / "out" / "packages.zip"
    without = [word for name in HEAVY for word in ("--without", name)]
    command = ["pipeline", "package", "--output", str(target), "--json", *without]
    assert main([*command, "--include", str(tmp_path / "app.py")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"conquiet", "redis", "msgspec"} <= set(told["packages"])
    assert not {"pyspark", "py4j", *HEAVY} & set(told["packages"])
    names = set(zipfile.ZipFile(target).namelist())
    assert {"app.py", "conquiet/__init__.py", "conquiet/spark/log/writer.py"} <= names
    assert "redis/__init__.py" in names
    assert not any("__pycache__" in name for name in names)


def test_what_cannot_be_included_or_left_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "packages.zip")
    missing = str(tmp_path / "none.py")
    assert main(["pipeline", "package", "--output", target, "--include", missing]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["pipeline", "package", "--output", target, "--without", "pandsa"]) == 2
    assert "pandsa cannot be left out" in capsys.readouterr().err


@pytest.fixture
def no_async_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a package that redis needs before Python 3.11.3 only; another may have brought it."""
    find = metadata.distribution

    def find_others(name: str) -> metadata.Distribution:
        if name == "async-timeout":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata, "distribution", find_others)


@pytest.fixture
def async_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same package, as if it were installed."""
    about = tmp_path / "site" / "async_timeout-5.0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: async-timeout\nVersion: 5.0.1\n")
    (about / "RECORD").write_text("async_timeout.py,,\n")
    (tmp_path / "site" / "async_timeout.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return about


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the marker is one of Python 3.11")
def test_what_the_python_of_the_executors_needs_and_is_missing_here_is_named(
    no_async_timeout,
) -> None:
    late = list_needed("conquiet", ["spark"], "3.11.7")
    assert "async-timeout" not in late
    with pytest.raises(ConfigError, match=r"redis needs async-timeout on Python 3\.11\.2"):
        list_needed("conquiet", ["spark"], "3.11.2")
    assert first_python(set(late)) == "3.11.3"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the marker is one of Python 3.11")
def test_an_archive_fits_the_pythons_that_need_what_is_in_it(async_timeout) -> None:
    """What is installed here, and not packed, is of no use to an executor."""
    late = list_needed("conquiet", ["spark"], "3.11.7")
    assert "async-timeout" not in late
    assert first_python(set(late)) == "3.11.3"
    early = list_needed("conquiet", ["spark"], "3.11.2")
    assert "async-timeout" in early
    assert first_python(set(early)) == "3.11.0"


@pytest.mark.parametrize("python", ["2.7.18", "3.99.1", "3", "newest"])
def test_an_archive_for_another_minor_version_is_refused(python, tmp_path, capsys) -> None:
    target = str(tmp_path / "packages.zip")
    assert main(["pipeline", "package", "--output", target, "--python", python]) == 2
    assert "an archive has compiled parts for Python" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "fits"), [("3.1.0", False), ("3.99.0", False), ("here", True)])
def test_an_archive_refuses_a_python_that_it_does_not_fit(first, fits, tmp_path) -> None:
    package = tmp_path / "conquiet" / "spark"
    package.mkdir(parents=True)
    for name in ("conquiet/__init__.py", "conquiet/spark/__init__.py"):
        source = "" if name.count("/") == 1 else Path(spark.__file__).read_text()
        (tmp_path / name).write_text(source)
    python = this_python() if first == "here" else first
    (tmp_path / "conquiet-packages.json").write_text(json.dumps({"python": python}))
    command = [sys.executable, "-c", "import conquiet.spark"]
    tried = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert (tried.returncode == 0) == fits, tried.stderr
    assert fits or f"packed for Python {first} and later" in tried.stderr


def test_the_dependencies_of_an_extra_are_found_through_theirs() -> None:
    assert {"conquiet", "redis", "hiredis", "sqlalchemy", "alembic", "mako"} <= set(
        list_needed("conquiet", ["spark"])
    )


def test_the_error_of_a_task_is_found_in_what_spark_says_of_a_query() -> None:
    said = """[STREAM_FAILED] Query [id = a1] terminated with exception: raised by \
the Python Proxy. Return Message: Traceback (most recent call last):
  File "tasks.py", line 92, in take
    frame.mapInArrow(run, "result BINARY").collect()
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
  Traceback (most recent call last):
    File "conquiet/spark/__init__.py", line 59, in _check_archive
      raise ImportError(
  ImportError: /srv/conquiet was packed for Python 3.11.3 and later patch releases
SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: pipeline [id = a1, runId = b2]
Current State: ACTIVE

JVM stacktrace:
org.apache.spark.SparkException: Job aborted
\tat org.apache.spark.scheduler.DAGScheduler(DAGScheduler.scala:1)"""
    assert last_words(said) == (
        "ImportError: /srv/conquiet was packed for Python 3.11.3 and later patch releases"
    )
