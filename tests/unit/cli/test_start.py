"""`conquiet` itself: quick to start, helpful, and honest in its exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator

import pytest

from conquiet.cli import build_parser, main
from conquiet.cli.terminal import confirm, has_colour, red
from conquiet.errors import ConfigError

HEAVY = {
    *("alembic", "celery", "confluent_kafka", "google", "hiredis", "jinja2", "jsonschema"),
    *("kombu", "opentelemetry", "pandas", "prometheus_client", "psycopg", "pyarrow"),
    *("pydantic", "pyspark", "redis", "sqlalchemy", "starlette", "uvicorn"),
}

LIST_IMPORTS = """
import json, sys
from conquiet.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""


def leaves(parser: ArgumentParser, path: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    for group in groups:
        for name, child in group.choices.items():
            yield from leaves(child, f"{path} {name}".strip())
    if not groups:
        yield path, parser


COMMANDS = dict(leaves(build_parser()))


@pytest.mark.parametrize("arguments", [["--help"], ["worker", "run", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIST_IMPORTS, *arguments], capture_output=True, text=True, check=True
    )
    modules = set(json.loads(run.stdout.splitlines()[-1]))
    assert not HEAVY & {name.partition(".")[0] for name in modules}
    rooms = {name for name in modules if name.startswith("conquiet.") and name.count(".") == 1}
    assert not rooms & {"conquiet.middleware", "conquiet.processes", "conquiet.jsonlines"}
    assert not rooms & {"conquiet.sql", "conquiet.redis", "conquiet.embedded", "conquiet.memory"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example_and_its_exit_codes(command: str) -> None:
    help_text = COMMANDS[command].format_help()
    assert f"conquiet {command}" in help_text.partition("example")[2]
    assert "exit codes" in help_text
    assert "--json" in help_text
    assert "--debug" in help_text


DELETES = ("outbox prune", "dead-letters drop", "streams trim", "kombu clean")


def parsers(parser: ArgumentParser, path: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, f"{path} {name}".strip())


PARSERS = dict(parsers(build_parser()))


@pytest.mark.parametrize("path", PARSERS)
def test_every_parser_keeps_to_the_form(path: str) -> None:
    parser = PARSERS[path]
    assert not parser.allow_abbrev
    examples = (parser.epilog or "").partition("example")[2]
    assert f"conquiet {path}".strip() in examples
    assert "exit codes" in parser.format_help()
    actions = [item for item in parser._actions if not isinstance(item, _SubParsersAction)]
    for action in actions:
        assert action.help, f"{path} {action.dest}: no help"
    for line in parser.format_help().splitlines():
        assert len(line) <= 120 or "://" in line, line


def test_what_deletes_asks_or_takes_yes() -> None:
    asking = {path for path, parser in COMMANDS.items() if "--yes" in parser.format_help()}
    assert set(DELETES) <= asking
    for path, parser in COMMANDS.items():
        if "delete" in (parser.description or "").lower():
            assert path in asking, path


def test_nothing_is_deleted_by_a_script_that_does_not_say_yes(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ConfigError, match="--yes confirms it"):
        confirm("delete all", yes=False)
    assert confirm("delete all", yes=True)


def test_whoever_is_asked_may_say_no(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", Screen(True))
    for answer, expected in (("y", True), ("YES ", True), ("", False), ("n", False)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert confirm("delete all", yes=False) is expected
    assert "nothing was deleted" in capsys.readouterr().err


def test_options_may_stand_before_arguments() -> None:
    parser = build_parser()
    for order in (["--table", "sales", "a", "b"], ["a", "--table", "sales", "b"]):
        chosen = parser.parse_args(["outbox", "retry", *order])
        assert (chosen.table, chosen.ids) == ("sales", ["a", "b"])


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"conquiet {version('conquiet')}\n"


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["outbox", "schema"], ["doctor", "--jso"], ["worker", "run"]],
)
def test_wrong_usage_is_one_line_that_names_the_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("conquiet")
    assert line.endswith("--help")


def test_it_runs_as_a_module_too() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "conquiet", "--help"], capture_output=True, text=True, check=True
    )
    assert "worker" in run.stdout
    assert "\x1b[" not in run.stdout


class Screen:
    def __init__(self, is_terminal: bool) -> None:
        self.isatty = lambda: is_terminal


def test_colour_is_for_terminals_whose_owner_does_not_mind(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert red("no", Screen(True)) == "\x1b[31mno\x1b[0m"
    assert red("no", Screen(False)) == "no"
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Screen(True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Screen(True))


@pytest.fixture
def broken_command(monkeypatch: pytest.MonkeyPatch):
    def breaking(error: BaseException) -> None:
        def run(options: object) -> int:
            raise error

        monkeypatch.setattr("conquiet.cli.doctor._run", run)

    return breaking


def test_an_error_is_one_line_without_traceback(broken_command, capsys) -> None:
    broken_command(KeyError("some\nthing"))
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "conquiet: error: KeyError: 'some\\nthing'; --debug shows where\n"


@pytest.mark.parametrize("arguments", [["doctor", "--debug"], ["--debug", "doctor"]])
def test_debug_shows_the_traceback(broken_command, capsys, arguments) -> None:
    broken_command(KeyError("x"))
    assert main(arguments) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_ends_with_the_code_that_shells_expect(broken_command) -> None:
    broken_command(KeyboardInterrupt())
    assert main(["doctor"]) == 130


def test_a_reader_that_has_seen_enough_is_no_reason_for_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-m", "conquiet", "doctor", "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert "Traceback" not in run.stderr
