"""The terminal: words that are nearly right, groups by themselves, tables that fit, watching."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conquiet.cli import main
from conquiet.cli.terminal import print_table
from conquiet.sql import engine, schema


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["steams", "lag"], "there is no 'steams'; did you mean streams?"),
        (["streams", "lgs"], "there is no 'lgs'; did you mean lag?"),
        (["streams", "lag", "--wach"], "unrecognized arguments: --wach; did you mean --watch?"),
        (["streams", "lag", "--watch", "soon"], "'soon' is not a number of seconds"),
        (["worker", "run", "app:router", "--thread=2"], "did you mean --threads"),
    ],
)
def test_a_word_that_is_nearly_right_is_suggested(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("arguments", [[], ["streams"], ["outbox"], ["dead-letters"]])
def test_a_group_alone_prints_its_help_and_is_no_success(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert "commands:" in said.out
    assert "example" in said.out
    assert said.err == ""


def read_terminal(code: str, columns: int) -> str:
    """Run code whose output is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env=environ)
    os.close(theirs)
    heard = b""
    try:
        while piece := os.read(ours, 65536):
            heard += piece
    except OSError:  # the other end is closed
        pass
    process.wait(30)
    os.close(ours)
    return heard.decode().replace("\r\n", "\n")


def test_a_table_fits_the_terminal_and_nothing_is_cut() -> None:
    code = (
        "from conquiet.cli.terminal import print_table\n"
        "print_table(('stream', 'who', 'waiting'),"
        " [('orders:' + 'x' * 60, 'group ' + 'billing-and-more ' * 3, 1234567)])"
    )
    said = read_terminal(code, 60)
    assert max(map(len, said.splitlines())) <= 60
    assert said.count("x") == 60
    assert said.count("billing-and-more") + said.count("billing-and-\n") >= 1
    assert "1,234,567" in said
    wide = read_terminal(code, 200)
    assert len(wide.splitlines()) == 2


def test_a_narrow_table_breaks_its_head_and_times_between_date_and_clock() -> None:
    code = (
        "from conquiet.cli.terminal import print_table\n"
        "row = ('1795120567087-0', '2026-11-19T20:36:07.087Z', 'vm-1911-770aaa5b87ec', 1.8, 24)\n"
        "print_table(('entry', 'added', 'consumer', 'seconds idle', 'deliveries'), [row])"
    )
    said = read_terminal(code, 80)
    assert max(map(len, said.splitlines())) <= 80
    assert said.splitlines() == [
        "entry            added          consumer              seconds  deliveries",
        "                                                         idle",
        "1795120567087-0  2026-11-19T    vm-1911-770aaa5b87ec      1.8          24",
        "                 20:36:07.087Z",
    ]
    assert len(read_terminal(code, 90).splitlines()) == 2


def test_a_row_of_a_list_goes_on_below_where_the_terminal_ends() -> None:
    code = (
        "from conquiet.cli.terminal import hang, print_row\n"
        "print_row('0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11', 'published', '', 'order.placed')\n"
        "print('    ' + hang('no such customer, or one without an address', 4))"
    )
    assert read_terminal(code, 50).splitlines() == [
        "0197f6c1-5f5e-7a53-9d0c-9d6f1f0b6a11  published",
        "  order.placed",
        "    no such customer, or one without an address",
    ]
    assert read_terminal(code, 30).splitlines()[-2:] == [
        "    no such customer, or one",
        "    without an address",
    ]
    assert len(read_terminal(code, 100).splitlines()) == 2


def test_a_table_in_a_pipe_has_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("stream", "bytes"), [("x" * 300, 1)])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_status_is_shown_again_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    made = engine(url)
    schema.init(made)
    made.dispose()
    rounds = iter(range(3))

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if next(rounds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("conquiet.cli.terminal.time.sleep", sleep)
    assert main(["outbox", "status", "--database", url, "--watch", "0.5"]) == 0
    assert len(re.findall("^pending", capsys.readouterr().out, re.M)) == 3
    assert main(["outbox", "status", "--database", url, "--watch", "0"]) == 2
