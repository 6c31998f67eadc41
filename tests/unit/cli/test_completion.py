"""Tab completes commands, options and their choices, in the shells that are there."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conquiet.cli import main


@pytest.fixture
def script(capsys, tmp_path):
    def write(shell: str) -> Path:
        assert main(["completion", shell]) == 0
        path = tmp_path / f"conquiet.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


CASES = [
    (["outbox", "re"], {"retry"}),
    (["str"], {"streams"}),
    (["queue", "p"], {"pending", "peek"}),
    (["--debug", "queue", "st"], {"stats"}),
    (["outbox", "list", "--st"], {"--state"}),
    (["outbox", "list", "--state", "p"], {"pending", "parked", "published"}),
    (["completion", "z"], {"zsh"}),
    (["dead-letters", "replay", "dead", "--dry"], {"--dry-run"}),
    (["relay", "run", "--config", "re"], set()),
]


def test_bash_offers_what_fits(script) -> None:
    lines = [f"source {script('bash')}"]
    for words, _ in CASES:
        lines.append(f"COMP_WORDS=(conquiet {' '.join(words)}); COMP_CWORD={len(words)}; _conquiet")
        lines.append('echo "${COMPREPLY[*]}"')
    run = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert [set(line.split()) for line in run.stdout.split("\n")[:-1]] == [
        expected for _, expected in CASES
    ]


def test_tab_in_a_bash_that_somebody_types_into(script) -> None:
    """`conquiet outbox re<TAB>` becomes `conquiet outbox retry`, on a real terminal."""
    path = script("bash")
    child, terminal = pty.fork()
    if child == 0:
        nobodys = {**os.environ, "PS1": "> ", "HISTFILE": "/dev/null"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], nobodys)
    try:
        os.write(terminal, f"bind 'set bell-style none'; source {path}; echo rea''dy\n".encode())
        _until(terminal, b"ready")
        os.write(terminal, b"conquiet outbox re\t")
        _until(terminal, b"retry ")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def _until(terminal: int, text: bytes) -> None:
    seen = b""
    end = time.monotonic() + 20
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{text!r} did not come: {seen!r}"
        seen += os.read(terminal, 4096)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish: apt-get install fish")
def test_fish_offers_what_fits(script) -> None:
    asked = [f"complete -C 'conquiet {' '.join(words)}'" for words, _ in CASES[:-1]]
    lines = [f"source {script('fish')}", *(f"{line}; echo ===" for line in asked)]
    run = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    answers = run.stdout.split("===\n")
    for (words, expected), answer in zip(CASES[:-1], answers, strict=False):
        offered = {line.partition("\t")[0] for line in answer.splitlines()}
        assert offered == expected, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh: apt-get install zsh")
def test_the_script_for_zsh_can_be_read(script) -> None:
    subprocess.run(["zsh", "-f", "-n", str(script("zsh"))], check=True)


def test_the_scripts_know_every_command(script, capsys) -> None:
    assert main(["completion", "bash", "--json"]) == 0
    places = json.loads(capsys.readouterr().out)
    paths = [" ".join(place["path"]) for place in places]
    assert {"outbox retry", "dead-letters replay", "streams trim"} <= set(paths)
    for shell in ("bash", "zsh", "fish"):
        text = script(shell).read_text()
        for path in filter(None, paths):
            assert path in text


def test_it_is_printed_for_a_shell_that_has_a_name() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "conquiet", "completion", "tcsh"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "choose from" in run.stderr
