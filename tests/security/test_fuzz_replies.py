"""Whatever a receiver or a server answers, a sink or a reader gives its own error, or a result."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.security.hostile import damaged, fuzzed

from conquiet import Message
from conquiet.errors import ConquietError, SinkUnavailable
from conquiet.operations.presence import check_relays
from conquiet.relay.sinks import HttpSink
from conquiet.spark.log.decoder import row_of
from conquiet.spark.log.resp import Table, locate

EVENT = {"specversion": "1.0", "id": "1", "type": "t", "source": "/s"}
GOOD = [
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\nretry-after: 9\r\ncontent-length: 0\r\n\r\n",
    b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"state": "up"}',
]
HOSTILE = [
    b"",
    b"\x00" * 100,
    b"HTTP/1.1 200 " + b"x" * 70_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1_000 + b"\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"HTTP/1.1 503 No\r\nretry-after: " + b"9" * 5_000 + b"\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 99999999999 No\r\n\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000,
    b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000,
]


class Answering:
    """A server that reads a request, says what it was told to, and hangs up."""

    def __init__(self) -> None:
        self.answer = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65_536)
                    connection.sendall(self.answer)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(1)
                    while connection.recv(65_536):
                        pass
                except OSError:
                    pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture(scope="module")
def server():
    server = Answering()
    yield server
    server.close()


def ask(server, answer):
    """A webhook gives one answer, or says that nobody is there; a relay is up, or it is not."""
    server.answer = answer
    sink = HttpSink(server.url, timeout=2)
    try:
        [error] = sink.publish_each([Message(b"{}", dict(EVENT))])
        assert error is None or isinstance(error, ConquietError)
        assert error is None or len(str(error)) < 2_000
    except SinkUnavailable as error:
        outage = str(error)
        assert len(outage) < 1_000
    finally:
        sink.close()
    [health] = check_relays([server.url], timeout=2)
    assert len(str(health.detail)) < 70_000


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers(server, answer) -> None:
    ask(server, answer)


@fuzzed(25)
@given(answer=st.binary(max_size=60) | damaged(st.sampled_from(GOOD)))
def test_answers(server, answer) -> None:
    ask(server, answer)


# --- Redis, as Spark reads it ---------------------------------------------------------------


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


pairs = st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=8)), min_size=1, max_size=3)
entries = st.lists(pairs, min_size=1, max_size=4)


def reply(found) -> bytes:
    parts = []
    for number, fields in enumerate(found):
        parts.append(
            b"*2\r\n" + bulk(b"17000000000%02d-0" % number) + b"*%d\r\n" % (2 * len(fields))
        )
        parts += [bulk(item) for pair in fields for item in pair]
    return b"".join(parts)


@fuzzed()
@given(damaged(entries.map(reply)), st.integers(0, 5))
def test_damaged_replies(content, count) -> None:
    """The fast reader believes nothing: it finds a table, or leaves it to another."""
    buffer = np.frombuffer(bytearray(b"*1\r\n" + content + b"\x00" * 8), np.uint8)
    table = locate(buffer, count, 4)
    assert table is None or isinstance(table, Table)
    for group in table.groups if table else ():
        assert (group.starts <= group.ends).all()
        assert (group.ends <= len(buffer)).all()


@fuzzed()
@given(st.none() | st.lists(st.binary(max_size=12), max_size=8))
def test_rows_of_any_fields(fields) -> None:
    row = row_of(fields)
    assert row.malformed is None or (row.malformed and not row.attributes)
