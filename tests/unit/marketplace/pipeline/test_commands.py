"""Wrong usage of the pipeline's commands is told in a line, before any Spark is started."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from conquiet.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--from", "files", "--tables", "all"], "say where the files are: --path"),
        (["run", "--from", "files", "--path", "log"], "--from files is for --tables all"),
        (
            ["run", "--from", "files", "--path", "log", "--tables", "all", "--max-events", "5"],
            "--option maxFilesPerTrigger=1",
        ),
        (
            ["run", "--from", "files", "--path", "log", "--tables", "fact_ordre"],
            "no table 'fact_ordre'; there are raw_events",
        ),
        (
            *(
                [
                    "run",
                    "--from",
                    "files",
                    "--path",
                    "log",
                    "--tables",
                    "all",
                    "--remote",
                    "sc://a",
                ],
            ),
            "--remote is for --tables raw_events",
        ),
        (
            [
                *("run", "--from", "outbox", "--url", "sqlite:///a", "--table", "outbox_events"),
                *("--tables", "all"),
            ],
            "add --once",
        ),
        (["show"], "name a table, or ask by --sql"),
        (["show", "shop_daily", "--sql", "SELECT 1"], "no table 'shop_daily'"),
        (["show", "shop_daily"], "no table 'shop_daily'"),
        (["show", "store_daily"], "has no tables of the marketplace"),
        (["reconcile"], "has no tables of the marketplace"),
        (["report"], "has no tables of the marketplace"),
        (["replay", "--since", "2026-03-02", "--until", "2026-03-01"], "is not before"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *arguments, "--to", str(tmp_path / "lake")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "lake").exists()


def run_files(path: Path, *, to: Path) -> int:
    told = ["run", "--from", "files", "--path", str(path), "--to", str(to), "--tables", "all"]
    return main(["pipeline", *told, "--once"])


def test_files_that_hold_no_log_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, lake = tmp_path / "log", tmp_path / "lake"
    assert run_files(log, to=lake) == 2
    assert "log: there is no such folder" in capsys.readouterr().err
    log.mkdir()
    (log / "part-0.parquet").write_text("PAR1 and nothing else")
    assert run_files(log, to=lake) == 2
    assert "part-0.parquet is no whole Parquet file" in capsys.readouterr().err
    pyarrow.parquet.write_table(pyarrow.table({"stream": ["a"]}), log / "part-0.parquet")
    assert run_files(log, to=lake) == 2
    assert "part-0.parquet has no column entry_id" in capsys.readouterr().err
    assert not lake.exists()


def test_tables_of_one_format_or_of_another_run_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "lake"
    (lake / "silver" / "_delta_log").mkdir(parents=True)
    log = tmp_path / "log"
    log.mkdir()
    assert run_files(log, to=lake) == 2
    assert "silver is a table of the format delta, not parquet" in capsys.readouterr().err
    told = ["run", "--url", "redis://localhost/0", "--streams", "pf-*", "--to", str(lake)]
    assert main(["pipeline", *told, "--once"]) == 2
    assert "add --tables all, or name another folder" in capsys.readouterr().err
    assert [path.name for path in lake.iterdir()] == ["silver"]


def test_no_rows_or_fewer_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pipeline", "show", "store_daily", "--limit", "0"])
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


def test_a_day_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pipeline", "replay", "--to", "lake", "--since", "soon", "--until", "2026-03-01"])
    assert "'soon' is no day such as 2026-01-31" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("origin", "said"),
    [("log", "say where the log is: --url"), ("outbox", "say where the outbox is: --url")],
)
def test_the_marketplace_s_streams_and_outbox_need_no_names(
    origin: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CONQUIET_BROKER_URL", "CONQUIET_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "run", "--from", origin, "--tables", "all", "--once"]) == 2
    assert said in capsys.readouterr().err
