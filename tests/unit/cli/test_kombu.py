"""`conquiet kombu`: what it refuses, and how; tests/integration/kombu/test_cli.py has the rest."""

from __future__ import annotations

import io

import pytest

from conquiet.cli import main


@pytest.fixture(autouse=True)
def no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONQUIET_BROKER_URL", raising=False)


@pytest.mark.parametrize("verb", ["inspect", "clean"])
def test_help_has_an_example_and_the_exit_codes(verb, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kombu", verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"conquiet kombu {verb} --broker" in text
    assert "exit codes:" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect"], "use --broker, or set CONQUIET_BROKER_URL"),
        (["inspect", "--broker", "http://h"], "--broker http://h:"),
        (["inspect", "--broker", "sentinel-streams://h"], "name the master itself"),
        (["clean", "--force", "--broker", "redis://h"], "--force belongs to --delete-queue"),
        (["clean", "--delete-queue", "q", "--broker", "redis://127.0.0.1:1"], "--yes confirms"),
        (
            ["clean", "--delete-dead-letters", "q", "--broker", "redis://127.0.0.1:1"],
            "--yes confirms",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody to ask
    assert main(["kombu", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("scheme", ["redis", "redis-streams"])
def test_a_server_out_of_reach_is_one_line_without_the_password(scheme, capsys) -> None:
    assert main(["kombu", "inspect", "--broker", f"{scheme}://:top-secret@127.0.0.1:1/0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"{scheme}://:***@127.0.0.1:1" in line
    assert "top-secret" not in line
