"""Wrong usage of the pipeline's commands is told in a line, before any Spark is started."""

from __future__ import annotations

from pathlib import Path

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
    for name in ("CONQUIET_REDIS_URL", "CONQUIET_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "run", "--from", origin, "--tables", "all", "--once"]) == 2
    assert said in capsys.readouterr().err
