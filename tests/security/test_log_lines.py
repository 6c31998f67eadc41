"""What a message says cannot look like a line of a log, nor steer the terminal that shows it."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from conquiet import Message, Router, cli
from conquiet.cli.logs import ConsoleFormatter, JsonFormatter
from conquiet.cli.terminal import print_table
from conquiet.errors import InvalidMessage, SinkUnavailable
from conquiet.message import describe
from conquiet.middleware import DeadLetter
from conquiet.relay import Relay
from conquiet.relay.relay import log_fields

FORGED = "a-1\n2026-01-01 ERROR root: all is lost \x1b[2J\x1b]0;title\x07\r\x9b1m\u2028\u202e\x7f"
STEERING = set(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E])) - {"\n"}
EVIL = {"specversion": "1.0", "id": FORGED, "type": f"t{FORGED}", "source": f"/s{FORGED}"}


def is_harmless(text: str, lines: int = 1) -> bool:
    return not STEERING & set(text) and len(text.splitlines()) == lines


def test_how_a_message_is_named() -> None:
    assert is_harmless(describe(EVIL))
    assert is_harmless(repr(Message(b"", EVIL)))
    with pytest.raises(InvalidMessage) as refused:
        Message(b"", {**EVIL, "time": FORGED}).time  # noqa: B018
    assert is_harmless(str(refused.value))


class Down:
    def publish_each(self, messages):
        raise SinkUnavailable(f"the receiver said {FORGED}")

    def close(self):
        pass


class Once:
    def __init__(self, *messages):
        self._batches = [messages]

    def read(self, limit, timeout):
        return self._batches.pop() if self._batches else ()

    def close(self):
        pass


def test_what_the_core_logs_under_any_formatter(caplog) -> None:
    """An application that set up its logs by itself is not steered either."""
    letters: list[Message[object]] = []

    class Sink:
        def publish_each(self, messages):
            letters.extend(messages)
            return [None] * len(messages)

    router = Router()
    router.use(DeadLetter(Sink(), max_attempts=1))

    @router.event(type=EVIL["type"])
    def take(order: dict[str, int]) -> None:
        raise ValueError(FORGED)

    good, bad = b'{"a": 1}', b'{"a": "b"}'
    router.process([Message(data, dict(EVIL)) for data in (good, bad)])
    router.process([Message(b"", {**EVIL, "type": f"unknown{FORGED}"})])
    with caplog.at_level(logging.DEBUG):
        Relay(Once(Message(b"", dict(EVIL))), Down()).run_once()
    assert letters
    assert len(caplog.records) >= 3
    for record in caplog.records:
        assert is_harmless(record.getMessage()), record.getMessage()


def _record() -> logging.LogRecord:
    try:
        raise ValueError(FORGED)
    except ValueError:
        record = logging.LogRecord(
            "conquiet", logging.ERROR, "x.py", 1, "it failed: %s", (FORGED,), sys.exc_info()
        )
    record.__dict__.update(log_fields(Message(b"", EVIL)))
    return record


def test_lines_of_the_relay_as_json() -> None:
    line = JsonFormatter().format(_record())
    assert is_harmless(line)
    assert json.loads(line)["event_id"] == FORGED
    assert json.loads(line)["message"] == f"it failed: {FORGED}"


def test_lines_on_a_console() -> None:
    first, *traceback = ConsoleFormatter().format(_record()).split("\n")
    assert is_harmless(first)
    assert "it failed: a-1\\n2026" in first
    assert traceback
    assert all(line.startswith("  ") and is_harmless(line) for line in traceback)


def test_rows_of_a_table(capsys) -> None:
    print_table(["id", "type"], [[FORGED, "t"], ["2", "t"]])
    assert is_harmless(capsys.readouterr().out, lines=3)


def test_an_error_of_a_command_with_its_traceback(capsys) -> None:
    code = cli._report(ValueError(FORGED), debug=True)
    *_, told = (err := capsys.readouterr().err).rstrip("\n").split("\n")
    assert code == cli.FAILED
    assert not STEERING & set(err)
    assert told.startswith("conquiet: error: ValueError: a-1 2026-01-01 ERROR root")
