"""Dockerfile, compose.yaml, Procfile, heroku.yml and Makefile: what they run can be run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conquiet.cli import build_parser
from conquiet.cli.settings import SETTINGS as OF_WORKER
from conquiet.relay.settings import SETTINGS
from conquiet.web import settings as web_settings

ROOT = Path(__file__).resolve().parents[3]
VARIABLES = {setting.variable for setting in (*SETTINGS, *OF_WORKER, *web_settings.SETTINGS)} | {
    "CONQUIET_CONFIG",
    "CONQUIET_OUTBOX_CATALOG",
    "CONQUIET_BROKER_URL",
}
FILES = ("Dockerfile", "compose.yaml", "Procfile", "heroku.yml", "Makefile")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def commands() -> list[list[str]]:
    """Every `conquiet …` that a file of the deployment runs."""
    found = [
        json.loads(text) for text in re.findall(r'(\["conquiet",[^\]]*\])', read("compose.yaml"))
    ]
    found += [json.loads(text) for text in re.findall(r"^CMD (.*)$", read("Dockerfile"), re.M)]
    for text in re.findall(r"^[\w-]+: (conquiet .*)$", read("Procfile"), re.M):
        found.append(shlex.split(text))
    for text in re.findall(r"- (conquiet .*)$", read("heroku.yml"), re.M):
        found.append(shlex.split(text))
    listed = re.search(r"- conquiet\n((?:      - .*\n)+)", read("compose.yaml"))
    found.append(["conquiet", *re.findall(r"- (.*)", listed[1])])
    return found


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[:3]))
def test_a_command_of_the_deployment_is_one_of_conquiet(command) -> None:
    program, *arguments = command
    assert program == "conquiet"
    assert callable(build_parser().parse_args(arguments).run)


def test_there_are_relay_worker_and_migration_in_each_place() -> None:
    verbs = [" ".join(command[1:3]) for command in commands()]
    assert verbs.count("relay run") == 4
    assert verbs.count("outbox migrate") == 3
    assert verbs.count("worker run") == 1
    assert verbs.count("dashboard") == 1


@pytest.mark.parametrize("name", FILES)
def test_variables_of_the_deployment_are_settings(name) -> None:
    assert set(re.findall(r"CONQUIET_[A-Z_]+", read(name))) <= VARIABLES


def test_the_image_runs_without_root_and_in_two_stages() -> None:
    text = read("Dockerfile")
    assert len(re.findall(r"^FROM ", text, re.M)) == 2
    assert re.search(r"^USER 10001$", text, re.M)
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for path in source.split():
            assert (ROOT / path).exists()
            assert f"!{path}" in read(".dockerignore")


@pytest.mark.parametrize("name", ["compose.yaml", "heroku.yml"])
def test_yaml_is_indented_by_two_and_has_no_tab(name) -> None:
    text = read(name)
    assert "\t" not in text
    for line in text.splitlines():
        assert (len(line) - len(line.lstrip())) % 2 == 0, line


def made(target: str, tmp_path: Path, **environ: str) -> list[str]:
    """What a target runs of its virtual environment."""
    for name in ("conquiet", "pip"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $* $CONQUIET_DATABASE_URL\n")
        (tmp_path / name).chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        ["make", "-s", "-o", "setup", f"BIN={tmp_path}", target],
        cwd=ROOT,
        env={**known, "DOCKER_HOST": "tcp://127.0.0.1:1", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_make_run_outbox_publisher_makes_a_database_of_its_own(tmp_path: Path) -> None:
    assert made("run-outbox-publisher", tmp_path) == [
        "conquiet outbox migrate sqlite:///outbox.sqlite",
        "conquiet relay run sqlite:///outbox.sqlite",
    ]


def test_make_run_outbox_publisher_changes_no_database_that_was_named(tmp_path: Path) -> None:
    url = "postgresql://db/shop"
    ran = made("run-outbox-publisher", tmp_path, CONQUIET_DATABASE_URL=url)
    assert ran == [f"conquiet relay run {url}"]


def test_make_build_makes_the_package(tmp_path: Path) -> None:
    wheel, image = made("build", tmp_path)
    assert wheel.startswith("pip wheel")
    assert "dist" in wheel
    assert "no Docker" in image


def test_on_heroku_database_and_redis_are_those_of_heroku_at_each_start() -> None:
    for name in ("Procfile", "heroku.yml"):
        text = read(name)
        assert text.count("$DATABASE_URL") == 2
        assert '--sink "${CONQUIET_OUTBOX_SINK:-$REDIS_URL}"' in text
