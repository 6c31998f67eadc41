"""What `--source` and `--sink` understand."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from conquiet.cli.addresses import Reading, open_sink, open_source, refuse_one_file_for_both
from conquiet.errors import ConfigError
from conquiet.message import Message

LINE = b'{"specversion": "1.0", "id": "1", "type": "t", "source": "/s"}\n'


def test_a_missing_package_is_told_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "conquiet.redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'conquiet\[redis\]'"):
        open_source("redis://localhost?stream=x&group=y", Reading())


@pytest.mark.parametrize("reading", [Reading(max_line_bytes=9), Reading(dead_letters=Path("x"))])
def test_streams_do_not_take_the_options_of_lines(reading) -> None:
    with pytest.raises(ConfigError, match="are for JSON lines"):
        open_source("redis://localhost?stream=x&group=y", reading)


@pytest.mark.parametrize("prefix", ["file:", "file://"])
def test_a_file_is_read_by_its_path(tmp_path, prefix) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINE)
    with ExitStack() as files:
        source = open_source(f"{prefix}{tmp_path}/in.jsonl", Reading(files=files))
        [message] = source.read(10, 1)
    assert message.id == "1"


def test_a_file_sink_appends(tmp_path) -> None:
    (tmp_path / "out.jsonl").write_bytes(LINE)
    with ExitStack() as files:
        sink = open_sink(f"file:{tmp_path}/out.jsonl", files)
        sink.publish([Message(b"1", {"id": "2", "type": "t", "source": "/s"})])
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://localhost", "say which stream, as in"),
        ("redis://localhost?stream=x&group=y&partitions=two", "not a whole number"),
        ("redis://localhost/x?stream=x&group=y&timeout=soon", "redis://…"),
        ("orders.jsonl", "write file:orders.jsonl"),
        ("kafka:x", "choose one of"),
        ("file:", "names no file"),
        ("file://host/path", "names no file"),
        ("file:/nonexistent/x", "No such file"),
        ("file:/", "Is a directory"),
    ],
)
def test_addresses_that_cannot_work_say_how_to_write_them(url, says) -> None:
    with pytest.raises(ConfigError, match=says):
        open_source(url, Reading())
    with ExitStack() as files, pytest.raises(ConfigError, match=says):
        open_sink(url, files)


def test_one_file_for_both_ends_would_never_end(tmp_path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(ConfigError, match="one file"):
        refuse_one_file_for_both(f"file:{tmp_path}/x", f"file:{tmp_path}/link")
    refuse_one_file_for_both(f"file:{tmp_path}/x", f"file:{tmp_path}/new")
