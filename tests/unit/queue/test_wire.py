"""How long the queue waits for a reply, with whatever connection it has got."""

from __future__ import annotations

import pytest
import redis

from conquiet.queue import queue


class Connection:
    def __init__(self, socket_timeout, readable=True):
        self.socket_timeout = socket_timeout
        self.readable = readable
        self.waited = None
        self.connected = True

    def pack_command(self, *arguments):
        return arguments

    def send_packed_command(self, command):
        self.sent = command

    def read_response(self, disable_decoding, timeout=None):
        assert disable_decoding
        self.waited = self.waited or timeout
        return b"reply"

    def can_read(self, timeout):
        self.waited = timeout
        return self.readable

    def disconnect(self):
        self.connected = False


def exchange(connection, wait_s):
    return queue._exchange(connection, b"XREADGROUP", (b"GROUP", 1), wait_s)


@pytest.fixture(params=[True, False], ids=["redis-py 8", "redis-py 6 and 7"])
def _either_redis_py(request, monkeypatch):
    monkeypatch.setattr(queue, "_TAKES_TIMEOUT", request.param)


@pytest.mark.usefixtures("_either_redis_py")
@pytest.mark.parametrize(
    ("socket_timeout", "wait_s", "expected"),
    [
        (5.0, 60.0, 65.0),
        # an idle server ends a blocking read up to a second late
        (0.01, 1.0, 2.1),
        # a reply that is due at once, or a client that waits for ever: as the client says
        (5.0, 0.0, None),
        (None, 60.0, None),
        # poll(2) cannot wait longer
        (5.0, 1e12, 2_000_000.0),
    ],
)
def test_5_4_a_blocking_read_waits_for_block_time_and_timeout(socket_timeout, wait_s, expected):
    connection = Connection(socket_timeout)
    assert exchange(connection, wait_s) == b"reply"
    assert connection.waited == expected
    assert connection.sent == (b"XREADGROUP", b"GROUP", 1)


def test_8_1_no_reply_in_time_is_a_timeout_and_the_connection_is_not_used_again(monkeypatch):
    monkeypatch.setattr(queue, "_TAKES_TIMEOUT", False)
    connection = Connection(5.0, readable=False)
    with pytest.raises(redis.TimeoutError, match="no reply within 65 s"):
        exchange(connection, 60.0)
    assert not connection.connected


def test_8_1_a_connection_that_brought_an_error_of_redis_is_used_again(monkeypatch):
    def refuse(**_):
        raise redis.ResponseError("BUSYGROUP")

    connection = Connection(5.0)
    monkeypatch.setattr(connection, "read_response", refuse)
    with pytest.raises(redis.ResponseError):
        exchange(connection, 0.0)
    assert connection.connected
